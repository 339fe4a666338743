"""The table of devices: sane figures, each with its source, and verdicts against them."""

import dataclasses
import re

import pytest

from mesp_mlx.errors import UserError
from mesp_mlx.memory import devices

NAMES = ["mac-8gb", "mac-16gb", "ipad-air", "ipad-pro-8gb", "ipad-pro-16gb", "iphone-15", "iphone-15-pro", "iphone-17-pro"]


def test_the_devices_that_were_promised():
    assert [device.name for device in devices.DEVICES] == NAMES


@pytest.mark.parametrize("device", devices.DEVICES, ids=lambda device: device.name)
def test_figures_are_sane(device):
    assert 0.4 * device.memory_bytes < device.limit_bytes <= device.app_bytes < device.memory_bytes
    assert device.metal_bytes is None or device.limit_bytes <= device.metal_bytes < device.memory_bytes
    assert (device.plain_bytes is None) == device.name.startswith("mac"), "only iOS knows the entitlement"
    assert device.plain_bytes is None or device.plain_bytes < device.app_bytes
    assert f"{device.memory_bytes / 2**30:g} GB" in device.title
    assert len(device.source) > 60 and re.search(r"\d", device.source)
    if device.estimate:
        assert re.search("estimate|taken from", device.source), "an estimate says what was guessed"
    with pytest.raises(dataclasses.FrozenInstanceError):
        device.app_bytes = 1


def test_metal_limits_a_large_mac_and_macos_a_small_one():
    small, large = devices.find("mac-8gb"), devices.find("mac-16gb")
    assert small.limit_bytes == small.app_bytes and small.metal_bytes and small.app_bytes < small.metal_bytes
    assert large.limit_bytes == large.metal_bytes < large.app_bytes


def test_unknown_name():
    with pytest.raises(UserError) as raised:
        devices.find("mac-9gb")
    assert "mac-9gb" in str(raised.value) and all(name in str(raised.value) for name in NAMES)


def test_verdicts():
    device = dataclasses.replace(devices.find("mac-8gb"), app_bytes=1000, metal_bytes=2000)
    asked = [devices.verdict(device, used) for used in (0, 800, 801, 1000, 1001)]
    assert asked == ["fits", "fits", "tight", "tight", "does not fit"]
