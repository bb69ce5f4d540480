"""The lab as a person uses it: a real JupyterLab in headless Chromium, the notebook that ships, real clicks and keys."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, expect, sync_playwright
from playwright.sync_api import TimeoutError as PlaywrightTimeout

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome") or shutil.which("chrome")
TOKEN = "lab"
pytestmark = [pytest.mark.browser, pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")]


class Server:
    """A JupyterLab over a copy of the notebooks, with no settings but its own."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "notebooks"
        shutil.copytree(NOTEBOOKS, self.root)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.base = f"http://127.0.0.1:{free.getsockname()[1]}"
        own = {f"JUPYTER_{name}_DIR": str(folder / name.lower()) for name in ("CONFIG", "DATA", "RUNTIME")}
        own |= {f"JUPYTERLAB_{name}_DIR": str(folder / name.lower()) for name in ("SETTINGS", "WORKSPACES")}
        # Else a pop-up asks over the page, and on a busy machine a dialog for the kernel.
        for extension, setting in {
            "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
            "notebook-extension/tracker": {"autoStartDefaultKernel": True},
        }.items():
            file = folder / "settings" / "@jupyterlab" / f"{extension}.jupyterlab-settings"
            file.parent.mkdir(parents=True)
            file.write_text(json.dumps(setting))
        options = ["--no-browser", "--allow-root", "--ip=127.0.0.1", f"--port={self.base.rsplit(':', 1)[1]}", "--ServerApp.port_retries=0"]
        options += [f"--IdentityProvider.token={TOKEN}", f"--ServerApp.root_dir={self.root}", "--ServerApp.terminals_enabled=False"]
        self.log = (folder / "server.log").open("w+")
        env = {**os.environ, **own, "OMP_NUM_THREADS": "1", "VRAMLAB_DEVICE": "cpu"}
        self.process = subprocess.Popen([sys.executable, "-m", "jupyterlab", *options], env=env, stdout=self.log, stderr=self.log)

    def wait(self) -> None:
        for _ in range(480):
            try:
                urllib.request.urlopen(f"{self.base}/api/status?token={TOKEN}", timeout=10).close()
                return
            except OSError:
                assert self.process.poll() is None, Path(self.log.name).read_text()
                time.sleep(0.25)
        raise TimeoutError(Path(self.log.name).read_text())

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.log.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("lab"))
    try:
        server.wait()
        yield server
    finally:
        server.stop()


@pytest.fixture
def page() -> Iterator[Page]:
    flags = ["--no-sandbox", "--disable-dev-shm-usage", "--disable-background-networking", "--disable-component-update", "--disable-gpu"]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=flags)
        # As tall as the notebook: JupyterLab renders only the cells in view.
        yield browser.new_page(viewport={"width": 1400, "height": 6400})
        browser.close()


@pytest.fixture
def notebook(server: Server, page: Page) -> Page:
    """Notebook 00, opened and run to the end."""
    name = "00_start_here.ipynb"
    page.goto(f"{server.base}/doc/tree/{name}?token={TOKEN}&reset", wait_until="domcontentloaded")
    page.locator('.jp-NotebookPanel-toolbar [data-status="idle"]').wait_for(timeout=120_000)
    begun = page.locator(".jp-InputPrompt").filter(has_text=re.compile(r"\[(\*|\d+)\]")).first
    for _ in range(6):
        page.get_by_role("menuitem", name="Run", exact=True).click()
        page.get_by_role("menuitem", name="Run All Cells", exact=True).click()
        try:
            begun.wait_for(timeout=20_000)
            break
        except PlaywrightTimeout:  # JupyterLab drops a command that comes while its kernel still connects
            continue
    return page


def output_of(page: Page, source: str) -> Any:
    """The output area of the cell whose source begins with a text."""
    return page.locator(".jp-CodeCell").filter(has=page.locator(".jp-InputArea-editor", has_text=source)).locator(".jp-Cell-outputArea")


def test_run_all_works_and_the_lab_measures_trains_and_stops(notebook: Page, tmp_path: Path) -> None:
    page = notebook
    lab = output_of(page, "lab = vl.Lab")
    expect(lab.get_by_text("measured: fp32, micro batch 4").first).to_be_visible(timeout=180_000)
    expect(output_of(page, "plain, _, checkpointed").get_by_text("same losses: True")).to_be_visible(timeout=180_000)
    expect(page.locator('.jp-OutputArea-output[data-mime-type="application/vnd.jupyter.error"]')).to_have_count(0)

    # micro-batch 4 to 8: activations double, parameters do not change
    slider = lab.locator(".noUi-handle").first
    slider.focus()
    page.keyboard.press("ArrowRight")
    row = lab.locator("table tr").filter(has_text=re.compile("^activations"))
    expect(row.first).to_contain_text("x 2.0", timeout=60_000)
    parameters = lab.locator("table tr").filter(has_text=re.compile("^parameters"))
    expect(parameters.first).to_contain_text("x 1.00")

    # Start: the figure changes while it trains; Stop ends it
    picture = lab.locator("img").first
    before = picture.get_attribute("src")
    lab.get_by_role("button", name="Start").click()
    expect(picture).not_to_have_attribute("src", before or "", timeout=60_000)
    expect(lab.get_by_text(re.compile(r"training .*step \d{3}")).first).to_be_visible(timeout=60_000)
    lab.screenshot(path=os.environ.get("VRAMLAB_SCREENSHOT") or tmp_path / "lab.png")
    lab.get_by_role("button", name="Stop").click()
    expect(lab.get_by_text(re.compile(r"stopped after \d+ steps")).first).to_be_visible(timeout=60_000)
    expect(lab.get_by_role("button", name="Start")).to_be_enabled()
    expect(lab.get_by_text("micro batch 8").last).to_be_visible()
