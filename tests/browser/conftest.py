"""JupyterLab on a copy of the notebooks, and a page in headless chromium that knows what it asked for outside this machine."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect, sync_playwright

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
CHROMIUM = ("chromium", "chromium-browser", "google-chrome")
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
         "--disable-component-update", "--disable-sync"]  # fmt: skip
SCREENSHOTS = "DSPARK_LAB_SCREENSHOTS"
expect.set_options(timeout=30_000)  # a busy machine is slow, not wrong: what fails here fails by what it shows
_HERE = re.compile(r"^(https?|wss?)://(localhost|127\.0\.0\.1)[:/]|^(data|blob|about):")


@pytest.fixture(scope="session")
def chromium() -> str:
    """The browser's path. Its absence is a failure: the panel is what people see, and nothing else looks at it."""
    found = next((path for name in CHROMIUM if (path := shutil.which(name))), None)
    if found is None:
        pytest.fail(f"none of {', '.join(CHROMIUM)} is on the path; install one: apt-get install chromium")
    return found


@pytest.fixture
def jupyter(tmp_path: Path) -> Iterator[str]:
    """URL of a JupyterLab whose root is a copy of the notebooks, with settings and kernels' files in the temporary folder too."""
    root, settings = tmp_path / "root", tmp_path / "settings"
    shutil.copytree(NOTEBOOKS, root, ignore=shutil.ignore_patterns("runs", "tb", ".*"))
    quiet = settings / "@jupyterlab" / "apputils-extension" / "notification.jupyterlab-settings"
    quiet.parent.mkdir(parents=True)
    quiet.write_text('{"fetchNews": "false", "checkForUpdates": false}')
    home = {name: str(tmp_path / name) for name in ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "IPYTHONDIR")}
    runtime = tempfile.mkdtemp(prefix="dspark-")  # short: paths of sockets have a limit
    port = _free_port()
    command = [sys.executable, "-m", "jupyterlab", f"--port={port}", "--ServerApp.port_retries=0", "--no-browser", "--allow-root",
               "--IdentityProvider.token=", "--ServerApp.password=", "--LabApp.extension_manager=readonly",
               f"--ServerApp.root_dir={root}", f"--LabApp.workspaces_dir={tmp_path / 'workspaces'}",
               f"--LabApp.user_settings_dir={settings}"]  # fmt: skip
    log = tmp_path / "jupyter.log"
    with log.open("wb") as out:
        server = subprocess.Popen(
            command, cwd=root, env={**os.environ, **home, "JUPYTER_RUNTIME_DIR": runtime}, stdout=out, stderr=out,
            stdin=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
    url = f"http://localhost:{port}"
    try:
        _wait_until_up(server, url, log)
        yield url
    finally:
        server.send_signal(signal.SIGTERM)
        try:
            server.wait(timeout=10)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()
        shutil.rmtree(runtime, ignore_errors=True)


@pytest.fixture
def asked_outside() -> list[str]:
    """What the page asked for outside this machine."""
    return []


@pytest.fixture
def page(chromium: str, asked_outside: list[str]) -> Iterator[Page]:
    """A page of 1280 × 800 that gets nothing from outside this machine."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=chromium, args=FLAGS, ignore_default_args=["--hide-scrollbars"]
        )
        page = browser.new_page(viewport={"width": 1280, "height": 800})
        for event in ("request", "websocket"):
            page.on(event, lambda asked: None if _HERE.match(asked.url) else asked_outside.append(asked.url))
        page.route(lambda url: not _HERE.match(url), lambda route: route.abort())
        yield page
        browser.close()


@pytest.fixture
def shots(tmp_path: Path, page: Page) -> Iterator[Path]:
    """A folder for screenshots, with the last state of the page; they are copied to where ``DSPARK_LAB_SCREENSHOTS`` says."""
    folder = tmp_path / "screenshots"
    folder.mkdir()
    yield folder
    page.screenshot(path=folder / "last.png")
    if where := os.environ.get(SCREENSHOTS):
        shutil.copytree(folder, where, dirs_exist_ok=True)


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def _wait_until_up(server: subprocess.Popen[bytes], url: str, log: Path) -> None:
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    end = time.monotonic() + 60
    while time.monotonic() < end and server.poll() is None:
        try:
            with direct.open(f"{url}/api", timeout=2):
                return
        except OSError:
            time.sleep(0.2)
    pytest.fail(f"JupyterLab did not come up at {url}:\n{log.read_text(errors='replace')[-2000:]}")
