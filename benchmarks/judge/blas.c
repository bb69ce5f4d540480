/* cuBLAS and cuBLASLt without products: everything succeeds, every algorithm that is asked for is found. */
#define API __attribute__((visibility("default")))
#define NOTHING(name) API int name() { return 0; }

API int cublasCreate_v2(void **handle) { /* each handle has a workspace of its own, so each has an address of its own */
    static long number = 0x100;
    *handle = (void *)(number += 0x100);
    return 0;
}
API int cublasGetMathMode(void *handle, int *mode) { *mode = 0; return 0; }
API int cublasGetPointerMode_v2(void *handle, int *mode) { *mode = 0; return 0; }
API unsigned long cublasLtGetVersion(void) { return 130100; }
API int cublasLtMatmulAlgoGetHeuristic(
    void *handle, void *operation, void *a, void *b, void *c, void *d, void *preference, int wanted, void *results, int *count) {
    *count = 1;
    return 0;
}

NOTHING(cublasCdotc_v2)
NOTHING(cublasCdotu_v2)
NOTHING(cublasCgelsBatched)
NOTHING(cublasCgemmStridedBatched)
NOTHING(cublasCgemm_v2)
NOTHING(cublasCgemv_v2)
NOTHING(cublasCgeqrfBatched)
NOTHING(cublasCgetrfBatched)
NOTHING(cublasCgetrsBatched)
NOTHING(cublasCtrsmBatched)
NOTHING(cublasCtrsm_v2)
NOTHING(cublasDdot_v2)
NOTHING(cublasDestroy_v2)
NOTHING(cublasDgelsBatched)
NOTHING(cublasDgemmStridedBatched)
NOTHING(cublasDgemm_v2)
NOTHING(cublasDgemv_v2)
NOTHING(cublasDgeqrfBatched)
NOTHING(cublasDgetrfBatched)
NOTHING(cublasDgetrsBatched)
NOTHING(cublasDotEx)
NOTHING(cublasDtrsmBatched)
NOTHING(cublasDtrsm_v2)
NOTHING(cublasGemmEx)
NOTHING(cublasGemmStridedBatchedEx)
NOTHING(cublasLtMatmul)
NOTHING(cublasLtMatmulAlgoCheck)
NOTHING(cublasLtMatmulAlgoConfigGetAttribute)
NOTHING(cublasLtMatmulAlgoConfigSetAttribute)
NOTHING(cublasLtMatmulAlgoInit)
NOTHING(cublasLtMatmulDescCreate)
NOTHING(cublasLtMatmulDescDestroy)
NOTHING(cublasLtMatmulDescSetAttribute)
NOTHING(cublasLtMatmulPreferenceCreate)
NOTHING(cublasLtMatmulPreferenceDestroy)
NOTHING(cublasLtMatmulPreferenceSetAttribute)
NOTHING(cublasLtMatrixLayoutCreate)
NOTHING(cublasLtMatrixLayoutDestroy)
NOTHING(cublasLtMatrixLayoutSetAttribute)
NOTHING(cublasSdot_v2)
NOTHING(cublasSetMathMode)
NOTHING(cublasSetPointerMode_v2)
NOTHING(cublasSetSmCountTarget)
NOTHING(cublasSetStream_v2)
NOTHING(cublasSetWorkspace_v2)
NOTHING(cublasSgelsBatched)
NOTHING(cublasSgemmEx)
NOTHING(cublasSgemmStridedBatched)
NOTHING(cublasSgemm_v2)
NOTHING(cublasSgemv_v2)
NOTHING(cublasSgeqrfBatched)
NOTHING(cublasSgetrfBatched)
NOTHING(cublasSgetrsBatched)
NOTHING(cublasStrsmBatched)
NOTHING(cublasStrsm_v2)
NOTHING(cublasZdotc_v2)
NOTHING(cublasZdotu_v2)
NOTHING(cublasZgelsBatched)
NOTHING(cublasZgemmStridedBatched)
NOTHING(cublasZgemm_v2)
NOTHING(cublasZgemv_v2)
NOTHING(cublasZgeqrfBatched)
NOTHING(cublasZgetrfBatched)
NOTHING(cublasZgetrsBatched)
NOTHING(cublasZtrsmBatched)
NOTHING(cublasZtrsm_v2)
