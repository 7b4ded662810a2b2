"""Host waits on the fake device: what is flagged, what passes, and what the message says."""

from __future__ import annotations

import inspect
import runpy
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from dspark_lab.errors import LabError
from dspark_lab.guards import Finding, GuardError, HostSyncGuard, fake_cuda, no_host_sync, watch

CASES = runpy.run_path(str(Path(__file__).parent / "cases.py"))
N, FAIL, PASS, names = (CASES[k] for k in ("N", "FAIL", "PASS", "names"))


@pytest.fixture(params=[False, True], ids=["grad", "inference"], autouse=True)
def _inference(request):
    with torch.inference_mode(request.param):
        yield


@pytest.fixture
def device():
    with fake_cuda() as fake:
        yield fake


@pytest.fixture
def lens(device):
    return torch.tensor([3, 0, 5], device=device)


def here() -> int:
    frame = inspect.currentframe()
    assert frame is not None
    assert frame.f_back is not None
    return frame.f_back.f_lineno


def test_the_seeds_own_line(device):
    line = here() + 2
    with pytest.raises(GuardError) as caught, no_host_sync():
        torch.tensor(N, dtype=torch.int32, device=device)
    message = str(caught.value)
    assert (
        f"test_syncs.py:{line} (test_the_seeds_own_line): torch.tensor(N, dtype=torch.int32, device=device): "
        in message
    )
    assert "pageable host-to-device copy and stream synchronise. Way out: " in message
    assert "persistent device buffer" in message
    assert "\n" not in message


def test_item(lens):
    with pytest.raises(GuardError, match="copies one number to the host and waits") as caught, no_host_sync():
        lens.sum().item()
    (finding,) = caught.value.findings
    assert (finding.kind, finding.call, finding.function, Path(finding.file).name) == (
        "sync",
        "lens.sum().item()",
        "test_item",
        "test_syncs.py",
    )


@pytest.mark.parametrize("code", FAIL)
def test_waits(device, code):
    space = names(device)
    with pytest.raises(GuardError, match="Way out"), no_host_sync():
        eval(code, space)


@pytest.mark.parametrize("code", PASS)
def test_does_not_wait(device, code):
    space = names(device)
    with no_host_sync():
        eval(code, space)


def test_staging_is_counted_and_can_be_forbidden(device):
    with no_host_sync() as guard:
        torch.tensor(N, dtype=torch.int32).to(device, non_blocking=True)
        torch.cuda.Event().synchronize()
    assert guard.counts() == {"pageable_staging": 1, "event_wait": 1}
    assert guard.violations == []
    staged = "pageable memory, which the driver stages"
    with pytest.raises(GuardError, match=staged), no_host_sync(allow_pageable_staging=False):
        torch.tensor(N, dtype=torch.int32).to(device, non_blocking=True)
    with pytest.raises(GuardError, match="waits for an event"), no_host_sync(allow_event_wait=False):
        torch.cuda.Event().synchronize()


def read_back(x):
    return x.sum().item()


class Reader:
    def read(self, x):
        return read_back(x)


def test_places_that_may(lens):
    line = inspect.getsourcelines(read_back)[1] + 1
    for allow in (
        "read_back",
        "Reader.read",
        f"test_syncs.py:{line}",
        "test_syncs.py",
        "guards/*.py",
        ("nothing_of_that_name", "read"),
        lambda finding: finding.call == "x.sum().item()",
    ):
        with no_host_sync(allow=allow) as guard:
            assert Reader().read(lens) == 8
        assert [f.allowed for f in guard.findings] == [True]
    for allow in ("other", "syncs.py", f"test_syncs.py:{line + 1}", "ead", lambda finding: False):
        with pytest.raises(GuardError), no_host_sync(allow=allow):
            Reader().read(lens)
    with pytest.raises(LabError, match="allow=3 is no place"):
        no_host_sync(allow=(3,))


def test_every_place_in_one_failure(lens):
    with pytest.raises(GuardError) as caught, no_host_sync(at_once=False):  # noqa: PT012
        for _ in range(3):
            lens.tolist()
            lens.sum().item()
        lens.cpu()
    head, *lines = str(caught.value).splitlines()
    assert head == "7 host synchronisations at 3 places:"
    assert [line.split("x ")[0].strip() for line in lines] == ["3", "3", "1"]


def test_a_swallowed_failure_comes_back_at_the_end(lens):
    with pytest.raises(GuardError, match=r"lens\.tolist\(\)"), no_host_sync():  # noqa: PT012
        try:
            lens.tolist()
        except Exception:
            pass


def test_other_errors_pass_through(lens):
    with pytest.raises(KeyError), no_host_sync(at_once=False):  # noqa: PT012
        lens.tolist()
        raise KeyError("mine")


def test_other_threads_are_not_watched(lens):
    seen: list[Any] = []

    def other():
        torch.cuda.synchronize()
        seen.append(True)

    with no_host_sync():
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert seen == [True]


def test_guards_nest_and_leave_nothing(lens):
    before = torch.cuda.synchronize, torch.cuda.Stream.synchronize, torch.cuda.Event.synchronize
    with no_host_sync(at_once=False, allow="test_guards_nest_and_leave_nothing") as outer:
        with pytest.raises(GuardError), no_host_sync():
            torch.cuda.synchronize()
        lens.tolist()
    assert [f.allowed for f in outer.findings] == [True]
    assert before == (torch.cuda.synchronize, torch.cuda.Stream.synchronize, torch.cuda.Event.synchronize)
    lens.tolist()
    with pytest.raises(LabError, match="open already"), outer, outer:
        pass


def test_finding_reads_like_a_line():
    f = Finding(kind="sync", call="x.item()", what="waits", way_out="do not", file="/a/b.py", line=3, function="f")
    assert str(f) == "/a/b.py:3 (f): x.item(): waits. Way out: do not."


def warn_as_torch_does() -> None:
    warnings.warn("called a synchronizing CUDA operation", stacklevel=1)


def test_a_warning_of_pytorch_gets_the_users_line():
    line = inspect.getsourcelines(warn_as_torch_does)[1] + 1
    with warnings.catch_warnings(record=True) as others:
        warnings.simplefilter("always")
        warnings.showwarning = watch.heard(warnings.showwarning, mode=0)
        warn_as_torch_does()  # without a guard, mode 0: nobody hears of it
        with pytest.raises(GuardError) as caught, no_host_sync():
            warn_as_torch_does()
        warnings.warn("another", stacklevel=1)
    (finding,) = caught.value.findings
    assert (Path(finding.file), finding.line, finding.function) == (Path(__file__), line, "warn_as_torch_does")
    assert finding.call == 'warnings.warn("called a synchronizing CUDA operation", stacklevel=1)'
    assert [str(w.message) for w in others] == ["another"]


def test_watching_only_keeps_every_wait(device):
    with HostSyncGuard(watch_only=True) as guard:
        for _ in range(3):
            torch.cuda.synchronize()
        guard.on_torch_warning()
        guard.on_torch_warning()
    assert guard.counts() == {"sync": 5}
