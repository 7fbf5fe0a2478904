"""What a reader sees: JupyterLab opens the chapter, Run All ends well, a prediction is kept, an exercise is
solved; TensorBoard answers."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[1]
CHROMIUM = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
)

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def browser():
    if CHROMIUM is None:
        if os.environ.get("REQUIRE_BROWSER"):
            pytest.fail("no Chromium on this machine, and REQUIRE_BROWSER is set")
        pytest.skip("no Chromium on this machine")
    sync_api = pytest.importorskip("playwright.sync_api")
    # --no-sandbox: Chromium refuses root, which is who runs tests in a container.
    options = [
        "--no-sandbox",
        "--disable-gpu",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
    ]
    with sync_api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=options)
        yield chromium
        chromium.close()


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_for(address, seconds=60):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(address, timeout=5) as answer:
                return answer.read().decode()
        except OSError:
            time.sleep(0.3)
    pytest.fail(f"{address.split('?')[0]} did not answer within {seconds} s")


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """`make lab` as a reader starts it, on a copy of the notebooks' repository state: its address, and where
    predictions go."""
    predictions = tmp_path_factory.mktemp("lab") / "predictions.json"
    port = free_port()
    environment = {
        **os.environ,
        "COURSE_PREDICTIONS": str(predictions),
        "LAB_ARGS": f"--port={port} --no-browser --LabApp.expose_app_in_browser=True",
    }
    environment.pop("COURSE_DATA", None)  # the reader's own: rendered once, used by every chapter
    server = subprocess.Popen(
        [sys.executable, ".ci/environment.py", "lab"], cwd=REPO, env=environment, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    address, seen = None, ""
    deadline = time.monotonic() + 90
    while address is None and time.monotonic() < deadline and server.poll() is None:
        line = server.stdout.readline()
        seen += line
        if found := re.search(r"http://(?:localhost|127\.0\.0\.1):\d+/\S*token=\w+", line):
            address = found.group()
    assert address, f"make lab printed no address:\n{seen}"
    drain = subprocess.Popen(["cat"], stdin=server.stdout, stdout=subprocess.DEVNULL)
    yield address, predictions
    os.killpg(server.pid, signal.SIGTERM)
    try:
        server.wait(20)
    except subprocess.TimeoutExpired:
        os.killpg(server.pid, signal.SIGKILL)
    drain.kill()


@pytest.fixture(scope="module")
def page(browser, lab):
    address, _ = lab
    page = browser.new_page(viewport={"width": 1400, "height": 1000})
    page.set_default_timeout(60_000)
    page.goto(address)
    page.wait_for_selector(".jp-Notebook .jp-Cell", timeout=90_000)
    yield page
    page.close()


def cell_with(page, text):
    """The code cell whose input holds ``text``, scrolled into view (JupyterLab draws only what is near)."""
    for _ in range(60):
        found = page.locator(".jp-CodeCell", has=page.locator(".jp-InputArea-editor", has_text=text))
        if found.count():
            found.first.scroll_into_view_if_needed()
            return found.first
        page.locator(".jp-WindowedPanel-outer").evaluate("node => node.scrollBy(0, 500)")
        page.wait_for_timeout(100)
    pytest.fail(f"no cell with {text!r}")


def run_all(page):
    page.locator(".lm-MenuBar-itemLabel", has_text=re.compile("^Run$")).click()
    page.locator(".lm-Menu-itemLabel", has_text=re.compile("^Run All Cells$")).click()


def notebook_model(page):
    """All cells of the open notebook, from JupyterLab's own model: (execution count, outputs as text)."""
    return page.evaluate(
        """() => {
          const panel = window.jupyterapp.shell.currentWidget;
          return Array.from(panel.content.widgets).filter(c => c.model.type === 'code').map(c => {
            const data = c.model.toJSON();
            return [data.execution_count, JSON.stringify(data.outputs)];
          });
        }"""
    )


def test_lab_opens_the_chapter_without_asking_about_news(page):
    assert "00_start_here" in page.url
    assert page.locator(".jp-Notebook h1").first.inner_text().startswith("00 · Start here")
    page.wait_for_timeout(2000)
    assert page.get_by_text("Would you like to").count() == 0


def test_run_all_ends_without_an_error(page):
    page.evaluate("""() => {
        const panel = window.jupyterapp.shell.currentWidget;
        const code = panel.content.widgets.map(c => c.model).filter(m => m.type === 'code');
        code.forEach(m => { m.clearExecution(); m.outputs.clear(); });
    }""")
    run_all(page)
    deadline = time.monotonic() + 180
    while time.monotonic() < deadline:
        cells = notebook_model(page)
        if all(count for count, _ in cells):
            break
        page.wait_for_timeout(1000)
    assert all(count for count, _ in cells), [count for count, _ in cells]
    assert not [outputs for _, outputs in cells if '"output_type":"error"' in outputs or '"name":"stderr"' in outputs]
    assert any("image/png" in outputs for _, outputs in cells)


def test_a_prediction_that_is_typed_is_kept_and_revealed(page, lab):
    _, predictions = lab
    box = cell_with(page, 'predict("00-naive-load"').locator("input[type=text]")
    box.fill("99")
    deadline = time.monotonic() + 20
    while "00-naive-load" not in json.loads(predictions.read_text()) and time.monotonic() < deadline:
        page.wait_for_timeout(200)
    assert json.loads(predictions.read_text())["00-naive-load"] == 99
    assert (
        not (REPO / "notebooks" / ".predictions.json").exists()
        or predictions != REPO / "notebooks" / ".predictions.json"
    )


def solve(page, source):
    """Put ``source`` into the exercise's cell, run it and its check, and return the check's line."""
    return page.evaluate(
        """async source => {
          const panel = window.jupyterapp.shell.currentWidget;
          const cells = Array.from(panel.content.widgets);
          const index = cells.findIndex(c => c.model.sharedModel.getSource().startsWith('def timed_batches'));
          cells[index].model.sharedModel.setSource(source);
          const kernel = panel.sessionContext.session.kernel;
          await kernel.requestExecute({code: source}).done;
          let text = '';
          const future = kernel.requestExecute({code: 'check("timed_batches", timed_batches)'});
          future.onIOPub = message => { if (message.header.msg_type === 'stream') text += message.content.text; };
          await future.done;
          return text;
        }""",
        source,
    )


def test_an_exercise_is_solved_wrong_and_right(page):
    wrong = "def timed_batches(batches, clock, waits):\n    for batch in batches:\n        yield batch\n"
    right = (REPO / "notebooks/solutions/00_timed_batches.py").read_text()
    assert "0 waits for 3 batches" in solve(page, wrong)
    assert "timed_batches: passed" in solve(page, right)


@pytest.fixture(scope="module")
def dataloader(browser, lab):
    """Chapter 01 in a page of its own, opened in the same JupyterLab."""
    address, _ = lab
    page = browser.new_page(viewport={"width": 1400, "height": 1000})
    page.set_default_timeout(60_000)
    page.goto(address.replace("00_start_here", "01_dataloader").replace("/lab/", "/lab/workspaces/second/"))
    page.wait_for_selector(".jp-Notebook .jp-Cell", timeout=90_000)
    yield page
    page.close()


RUN = """async pattern => {
  const panel = window.jupyterapp.shell.currentWidget;
  await panel.sessionContext.ready;
  await panel.sessionContext.session.kernel.requestExecute({code: 'import matplotlib.pyplot as plt'}).done;
  const cells = Array.from(panel.content.widgets).filter(c => c.model.type === 'code');
  const cell = cells.find(c => c.model.sharedModel.getSource().includes(pattern));
  panel.content.activeCellIndex = panel.content.widgets.indexOf(cell);
  await window.jupyterapp.commands.execute('notebook:run-cell');
  return [cell.model.executionCount, JSON.stringify(cell.model.outputs.toJSON())];
}"""


def test_a_slider_moves_the_picture(dataloader):
    page = dataloader
    for pattern in ("banner()", "three_kinds()", "live(draw"):
        count, outputs = page.evaluate(RUN, pattern)
        assert count and '"output_type":"error"' not in outputs, outputs[-2000:]
    cell = cell_with(page, "live(draw")
    picture = cell.locator(".jp-OutputArea img.widget-image").last
    before = picture.get_attribute("src")
    handle = cell.locator(".noUi-handle").first
    handle.focus()
    start = time.monotonic()
    for _ in range(5):
        handle.press("ArrowRight")
    while picture.get_attribute("src") == before and time.monotonic() - start < 20:
        page.wait_for_timeout(50)
    assert picture.get_attribute("src") != before


def test_tensorboard_shows_a_run(browser, tmp_path, digits):
    from helpers.config import preset
    from helpers.train import train

    settings = {
        "data": str(digits),
        "image_size": 32,
        "progress": False,
        "device": "cpu",
        "epochs": 2,
        "cache": False,
        "workers": 0,
    }
    train(preset("tuned", run_dir=str(tmp_path / "run"), precision="fp32", log_every=1, **settings))
    port = free_port()
    command = [
        sys.executable,
        "-m",
        "tensorboard.main",
        "--logdir",
        tmp_path,
        "--port",
        str(port),
        "--host",
        "127.0.0.1",
    ]
    board = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_for(f"http://127.0.0.1:{port}/")
        deadline = time.monotonic() + 60
        while (
            "train/loss" not in (tags := wait_for(f"http://127.0.0.1:{port}/data/plugin/scalars/tags"))
            and time.monotonic() < deadline
        ):
            time.sleep(0.5)
        assert {"train/loss", "train/lr", "eval/accuracy", "eval/images_per_s", "eval/memory_mb"} <= set(
            json.loads(tags)["run"]
        )
        page = browser.new_page()
        page.goto(f"http://127.0.0.1:{port}/#timeseries")
        page.get_by_text("/accuracy").first.wait_for(timeout=60_000)
        page.close()
    finally:
        board.terminate()
        board.wait(20)
