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
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Locator, Page, expect, sync_playwright
from playwright.sync_api import TimeoutError as PlaywrightTimeout

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome") or shutil.which("chrome")
TOKEN = "lab"
NAME = "00_start_here.ipynb"
FIRST, SECOND = "lab = vl.Lab", "planner = vl.Lab"
pytestmark = [pytest.mark.browser, pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")]


class Server:
    """A JupyterLab over a copy of the notebooks, with no settings but its own."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "notebooks"
        shutil.copytree(NOTEBOOKS, self.root)
        fresh = json.loads((self.root / NAME).read_text())
        for cell in fresh["cells"]:  # so that a number beside a cell says that it was run
            if cell["cell_type"] == "code":
                cell |= {"outputs": [], "execution_count": None}
        (self.root / NAME).write_text(json.dumps(fresh))
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


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    flags = ["--no-sandbox", "--disable-dev-shm-usage", "--disable-background-networking", "--disable-component-update", "--disable-gpu"]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=flags)
        # As wide as a 13-inch screen, as tall as the notebook: JupyterLab renders only the cells in view.
        yield browser.new_page(viewport={"width": 1280, "height": 12000})
        browser.close()


@pytest.fixture(scope="module")
def notebook(server: Server, page: Page) -> Page:
    """Notebook 00, opened and run to the end."""
    page.goto(f"{server.base}/doc/tree/{NAME}?token={TOKEN}&reset", wait_until="domcontentloaded")
    page.locator('.jp-NotebookPanel-toolbar [data-status="idle"]').wait_for(timeout=120_000)
    first = cell_of(page, "import torch")
    for _ in range(6):
        again(page, "import torch")
        try:
            first.locator(".jp-InputPrompt").filter(has_text=re.compile(r"\[\d+\]")).wait_for(timeout=30_000)
            break
        except PlaywrightTimeout:  # JupyterLab drops a command that comes while its kernel still connects
            continue
    lost = page.get_by_text("model not found")
    for _ in range(3):
        menu(page, "Run", "Run All Cells")
        output_of(page, FIRST).locator(".jp-OutputArea-output").first.wait_for(timeout=120_000)
        if not lost.count():  # as it does with widgets that come before it listens to them
            break
    return page


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where screenshots go: the folder that VRAMLAB_SCREENSHOTS names, kept, or a temporary one."""
    folder = Path(os.environ.get("VRAMLAB_SCREENSHOTS") or tmp_path_factory.mktemp("screenshots"))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def menu(page: Page, name: str, item: str) -> None:
    page.get_by_role("menuitem", name=name, exact=True).click()
    page.get_by_role("menuitem", name=item, exact=True).click()


def cell_of(page: Page, source: str) -> Locator:
    """The cell whose source begins with a text."""
    return page.locator(".jp-CodeCell").filter(has=page.locator(".jp-InputArea-editor", has_text=source))


def output_of(page: Page, source: str) -> Locator:
    return cell_of(page, source).locator(".jp-Cell-outputArea")


def button(lab: Locator, name: str) -> Locator:
    """By its whole name, before which an icon may stand."""
    return lab.get_by_role("button", name=re.compile(rf"^\W*{re.escape(name)}$"))


def bar(lab: Locator) -> Locator:
    """The bar says in words what it shows."""
    return lab.locator("[role=img][aria-label^='Predicted peak']").first


HEARD = """
window.heard = [];
new MutationObserver(() => document.querySelectorAll("[role=status]").forEach(e => heard.push(e.textContent)))
    .observe(document.body, {subtree: true, childList: true});
"""
"""Keeps what the page says from now on."""


def says(lab: Locator, pattern: str, timeout: float = 60_000) -> None:
    expect(lab.locator("[role=status]").filter(has_text=re.compile(pattern)).first).to_be_visible(timeout=timeout)


def moves(lab: Locator, act: Callable[[], object]) -> None:
    """Whether the bar is another one after what is done."""
    before = bar(lab).get_attribute("aria-label") or ""
    act()
    expect(bar(lab)).not_to_have_attribute("aria-label", before, timeout=60_000)


def test_run_all_works_and_the_first_lab_shows_what_was_measured(notebook: Page, pictures: Path) -> None:
    lab = output_of(notebook, FIRST)
    says(lab, "^measured 10.03 MiB", 180_000)
    lab.screenshot(path=pictures / "measured.png")
    expect(output_of(notebook, "plain, _, checkpointed").get_by_text("same losses: True")).to_be_visible(timeout=180_000)
    expect(output_of(notebook, "try:")).to_contain_text("nothing to accumulate", timeout=180_000)
    expect(notebook.locator('.jp-OutputArea-output[data-mime-type="application/vnd.jupyter.error"]')).to_have_count(0)
    size = lab.locator(".jupyter-widgets.widget-vbox").first.bounding_box()
    assert size is not None
    assert size["x"] + size["width"] <= 1280


def test_each_switch_moves_the_bar(notebook: Page) -> None:
    lab, keys = output_of(notebook, FIRST), notebook.keyboard

    def slide(number: int, key: str) -> None:
        lab.locator(".noUi-handle").nth(number).focus()
        keys.press(key)

    moves(lab, lambda: slide(0, "ArrowRight"))
    field = lab.get_by_label("micro-batch", exact=True)
    expect(field).to_have_value("5")
    moves(lab, lambda: field.press("ArrowUp"))
    moves(lab, lambda: (field.fill("9"), field.press("Enter")))
    expect(lab.locator(".noUi-handle").first).to_have_attribute("aria-valuenow", "9.0", timeout=30_000)
    moves(lab, lambda: slide(1, "ArrowRight"))
    moves(lab, lambda: slide(1, "ArrowLeft"))
    for name in ("amp-bf16", "blocks", "sgd"):
        moves(lab, lambda name=name: button(lab, name).click())  # type: ignore[misc]
    moves(lab, lambda: button(lab, "math").press("Enter"))  # the keyboard does it too
    moves(lab, lambda: lab.get_by_label("loss chunks").select_option("8"))
    # Not the table: it names what the setting before held, and who moves fast is still compared with the first.
    expect(bar(lab)).not_to_have_attribute("aria-label", re.compile("optimizer state"), timeout=60_000)
    for name in ("fp32", "none", "adamw", "sdpa"):
        button(lab, name).first.click()
    lab.get_by_label("loss chunks").select_option("1")


def test_each_control_has_a_name_that_a_screen_reader_says_and_the_state_is_said_in_words(notebook: Page) -> None:
    lab = output_of(notebook, FIRST)
    named = lab.locator("input, select, button").evaluate_all(
        "found => found.filter(e => e.offsetParent).map(e => [e.labels?.[0]?.textContent, e.ariaLabel, e.textContent].find(t => t?.trim()))"
    )
    assert len(named) > 30
    assert all(named)
    for name in ("micro-batch", "accumulation"):  # beside the sliders, whose handles have none
        expect(lab.get_by_role("spinbutton", name=name, exact=True)).to_be_visible()
    button(lab, "blocks").click()
    says(lab, "^fp32, micro batch 9, checkpointing blocks, adamw$")
    button(lab, "none").first.click()
    says(lab, "^fp32, micro batch 9, adamw$")


def test_switches_that_exclude_one_another_offer_the_way_out(notebook: Page, pictures: Path) -> None:
    lab = output_of(notebook, FIRST)
    lab.get_by_role("checkbox").first.check()
    lab.locator(".noUi-handle").nth(1).focus()
    notebook.keyboard.press("ArrowRight")
    expect(lab.get_by_role("alert")).to_contain_text("there is nothing to accumulate")
    says(lab, "^not possible")
    expect(button(lab, "Start")).to_be_disabled()
    lab.screenshot(path=pictures / "conflict.png")
    button(lab, "set in backward off").click()
    expect(lab.get_by_role("alert")).to_have_count(0)
    lab.locator(".noUi-handle").nth(1).focus()
    notebook.keyboard.press("ArrowLeft")
    says(lab, "^measured")


def test_start_draws_and_stop_ends_and_two_runs_are_compared(notebook: Page, pictures: Path) -> None:
    lab = output_of(notebook, FIRST)
    loss = lab.locator("svg[aria-label^='loss']").first
    for number, name in enumerate(("none", "blocks"), 1):
        button(lab, name).first.click()
        button(lab, "Start").click()
        says(lab, r"^training on cpu: step \d{2,}")
        before = loss.get_attribute("aria-label") or ""
        expect(loss).not_to_have_attribute("aria-label", before, timeout=30_000)
        lab.screenshot(path=pictures / f"training-{number}.png")
        button(lab, "Stop").click()
        says(lab, r"^stopped after \d+ steps")
        expect(button(lab, "Start")).to_be_enabled()
    expect(lab.get_by_text("+ checkpointing blocks").first).to_be_visible()
    button(lab, "compare all").click()
    expect(lab.locator("[role=img][aria-label^='Peaks:']")).to_be_visible()
    button(lab, "timelines").click()
    expect(lab.locator("svg[aria-label^='Memory through one step']")).to_be_visible()
    button(lab, "copy recipe").click()
    line = lab.get_by_label("Python")
    expect(line).to_have_value(re.compile(r"^recipes = \[vl\.Recipe\(.*\), vl\.Recipe\(.*checkpointing='blocks'\)\]$"), timeout=30_000)
    expect(lab.get_by_text("copied", exact=True)).to_be_visible(timeout=30_000)
    notebook.context.grant_permissions(["clipboard-read"])
    assert notebook.evaluate("navigator.clipboard.readText()") == line.input_value()
    lab.screenshot(path=pictures / "compared.png")


def test_on_a_card_the_bar_follows_and_an_out_of_memory_error_is_explained(notebook: Page, pictures: Path) -> None:
    """The second lab in the same notebook: GPT-2 on virtual cards."""
    lab = output_of(notebook, SECOND)
    says(lab, "^does not fit.*traced", 120_000)
    expect(lab.get_by_text(re.compile(r"micro-batches up to \d+ fit")).first).to_be_visible(timeout=120_000)
    lab.locator(".noUi-handle").first.focus()
    for _ in range(16):
        moves(lab, lambda: notebook.keyboard.press("ArrowLeft"))  # each by the law, while it is dragged
    says(lab, "^fits.*traced")
    button(lab, "keep plan").click()
    notebook.evaluate(HEARD)
    lab.get_by_label("card", exact=True).select_option(label="virtual RTX 4060 (7.62 GiB)")
    says(lab, "^does not fit.*too much reserved traced$")
    heard = notebook.evaluate("heard")  # too soon gone to be waited for
    assert any(re.match(r"not sure yet about .* as on RTX 4090, tracing", words) for words in heard), heard
    button(lab, "Start").click()
    says(lab, "^out of memory RTX 4060", 120_000)
    expect(lab.get_by_text("held by category")).to_be_visible()
    lab.screenshot(path=pictures / "out-of-memory.png")
    lab.get_by_label("loss chunks").select_option("8")
    says(lab, "^fits.*traced")
    button(lab, "Start").click()
    says(lab, r"^running on a virtual RTX 4060: step [2-9]", 120_000)
    button(lab, "Stop").click()
    says(lab, r"^stopped after \d+ steps")
    button(lab, "compare all").click()
    expect(lab.locator("[role=img][aria-label^='Peaks:']")).to_be_visible(timeout=30_000)
    lab.screenshot(path=pictures / "card.png")


def test_the_same_cell_run_again_while_it_trains_can_stop_what_goes_on(notebook: Page) -> None:
    lab = output_of(notebook, FIRST)
    button(lab, "Start").click()
    says(lab, r"^training on cpu: step \d")
    again(notebook)
    says(lab, "^measured|run has ended")
    button(lab, "Start").click()
    says(lab, "^One run at a time")
    button(lab, "Stop").click()
    expect(button(lab, "Start")).to_be_enabled()
    says(lab, "^measured")


def test_the_saved_notebook_shows_a_picture_without_a_kernel(notebook: Page, server: Server, pictures: Path) -> None:
    for attempt in range(10):  # a lab whose cell has just been run draws when it has measured
        heights = saved_heights(notebook, server.root / NAME, pictures)
        if min(heights) > 150:  # memory through a step, not a line of text
            return
        time.sleep(2 * attempt)
    raise AssertionError(f"the labs' pictures are {heights} pixels high")


def saved_heights(notebook: Page, file: Path, pictures: Path) -> list[float]:
    """How high the pictures of both labs are in the notebook as it is saved now, turned into a page."""
    before = file.stat().st_mtime_ns
    notebook.keyboard.press("Escape")
    notebook.keyboard.press("Control+s")
    for _ in range(200):
        if file.stat().st_mtime_ns != before:
            break
        time.sleep(0.1)
    time.sleep(1)  # it is written in one go, but after its time
    command = [sys.executable, "-m", "nbconvert", "--to", "html", "--output-dir", str(pictures), str(file)]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    browser = notebook.context.browser
    assert browser is not None
    page = browser.new_page()
    page.goto((pictures / NAME).with_suffix(".html").as_uri())
    found = []
    for source in (FIRST, SECOND):
        image = page.locator(".jp-CodeCell").filter(has_text=source).locator(".jp-OutputArea").locator("img").first
        size = image.bounding_box() if image.count() else None
        found.append(size["height"] if size is not None else 0.0)
    page.close()
    return found


def test_after_a_restart_the_cells_make_a_new_lab(notebook: Page) -> None:
    notebook.get_by_role("button", name="Restart the kernel", exact=True).click()
    notebook.locator(".jp-Dialog .jp-mod-accept").click()
    notebook.locator('.jp-NotebookPanel-toolbar [data-status="idle"]').wait_for(timeout=60_000)
    for source in ("import torch", "guess = 4", FIRST):
        again(notebook, source)
    lab = output_of(notebook, FIRST)
    says(lab, "^measured 10.03 MiB", 120_000)
    button(lab, "Start").click()
    says(lab, r"^training on cpu: step \d")
    button(lab, "Stop").click()
    says(lab, r"^stopped after")


def again(page: Page, source: str = "lab = vl.Lab") -> None:
    """Run one cell."""
    cell_of(page, source).locator(".jp-InputArea-editor").click()
    page.keyboard.press("Control+Enter")
