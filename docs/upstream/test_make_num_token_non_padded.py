"""DSpark builds the draft batch's device scalar only where something reads it.

`num_token_non_padded` is read behind `enable_num_token_non_padded()` alone. With the switch off the helper must return None
and touch no tensor at all, or every decode step pays for a copy that nobody reads; with it on, the scalar must arrive on the
device as int32, without blocking the host.
"""

import unittest
from unittest.mock import patch

import torch
from sglang.srt.speculative.dspark_components import dspark_draft
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.test_utils import CustomTestCase
from torch.utils._python_dispatch import TorchDispatchMode

register_cpu_ci(est_time=5, suite="base-a-test-cpu")


class _Recorder(TorchDispatchMode):
    """Every op that reaches the dispatcher, with its keyword arguments."""

    def __init__(self):
        super().__init__()
        self.ops = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ops.append((str(func), kwargs or {}))
        return func(*args, **(kwargs or {}))

    @property
    def copies(self):
        return [kwargs for name, kwargs in self.ops if "_to_copy" in name or "copy_" in name]


def _switch(on):
    # patched where it is used: the real one reads the published parallel state
    return patch.object(dspark_draft, "enable_num_token_non_padded", return_value=on)


class TestMakeNumTokenNonPadded(CustomTestCase):
    def test_off_returns_none_and_touches_no_tensor(self):
        for device in ("cpu", "meta", torch.device("meta")):
            with self.subTest(device=device), _switch(False), _Recorder() as recorder:
                self.assertIsNone(dspark_draft._make_num_token_non_padded(40, device))
                self.assertEqual(recorder.ops, [])

    def test_on_returns_one_int32_element_with_the_count(self):
        # 0 is a count too (an idle rank), not an absence
        for num_tokens in (0, 1, 5, 40, 2**20):
            with self.subTest(num_tokens=num_tokens), _switch(True):
                scalar = dspark_draft._make_num_token_non_padded(num_tokens, "cpu")
                self.assertIsInstance(scalar, torch.Tensor)
                self.assertEqual(scalar.dtype, torch.int32)
                self.assertEqual(scalar.numel(), 1)
                self.assertEqual(scalar.item(), num_tokens)

    def test_on_arrives_on_the_device_without_blocking(self):
        # "meta" stands for a device that is not the host's, so that the copy happens on a machine without one
        for device in ("meta", torch.device("meta")):
            with self.subTest(device=device), _switch(True), _Recorder() as recorder:
                scalar = dspark_draft._make_num_token_non_padded(40, device)
                self.assertIsNotNone(scalar)
                self.assertEqual(scalar.device.type, "meta")
                # none seen: built on the device by the constructor, which copies from pageable memory and waits
                self.assertEqual(len(recorder.copies), 1)
                self.assertTrue(recorder.copies[0].get("non_blocking"))

    def test_the_switch_is_asked_at_every_call(self):
        for on in (False, True, False):
            with self.subTest(on=on), _switch(on):
                scalar = dspark_draft._make_num_token_non_padded(5, "cpu")
                self.assertEqual(scalar is not None, on)


if __name__ == "__main__":
    unittest.main()
