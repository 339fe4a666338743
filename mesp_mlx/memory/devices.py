"""How much memory one app may have on the devices that a run is judged against.

Apple promises none of these figures: they are what the system's own calls answered on such devices, as others published it.
GB that a source gives in round numbers is taken as 10^9 bytes, the smaller reading; MB of a jetsam limit or a GiB of memory are 2^20 and 2^30.
"""

from dataclasses import dataclass

from mesp_mlx.errors import UserError

GIB = 2**30
TIGHT = 0.8  # of the limit: what is left above it goes quickly to a longer row, a display or a second app


@dataclass(frozen=True)
class Device:
    """A device's memory and what one app gets of it. All sizes in bytes.

    Attributes:
        memory_bytes: what is built in.
        app_bytes: what the system leaves one app: on a Mac memory less what macOS itself takes, on iOS the size at which jetsam ends the app
            (with the entitlement com.apple.developer.kernel.increased-memory-limit).
        metal_bytes: Metal's recommendedMaxWorkingSetSize, where it is known.
        plain_bytes: app_bytes without the entitlement, on iOS.
        estimate: whether a figure that sets the limit was inferred rather than read on this very device.
        source: where the figures come from.
    """

    name: str
    title: str
    memory_bytes: int
    app_bytes: int
    metal_bytes: int | None
    plain_bytes: int | None
    estimate: bool
    source: str

    @property
    def limit_bytes(self) -> int:
        """The most that one app can use: what the system leaves it, and no more than Metal recommends."""
        return min(self.app_bytes, self.metal_bytes or self.app_bytes)


_ARTSTUDIO = "Artstudio Pro's developers on M1 iPad Pros, iPadOS 15 (macrumors.com/2021/09/17/ipados-15-up-to-12gb-ram-high-end-ipad-pro)"
_IPAD_PLAIN = "5 GB without the entitlement (macrumors.com/2021/05/28/ipados-limits-app-ram-even-on-m1-ipad-pro)"
_IPAD_REGRESSION = "iPadOS 26.4 and 26.5 are reported to leave 3 GB (developer.apple.com/forums/thread/826325)"

DEVICES = (
    Device(
        "mac-8gb",
        "Mac, 8 GB",
        8 * GIB,
        app_bytes=8 * GIB - 3_000_000_000,
        metal_bytes=5_726_630_000,
        plain_bytes=None,
        estimate=True,
        source="recommendedMaxWorkingSetSize 5,726.63 MB, two thirds of memory, in llama.cpp's logs of 8 GB M1s; that macOS and an open app or two take "
        "3 GB is an estimate",
    ),
    Device(
        "mac-16gb",
        "Mac, 16 GB",
        16 * GIB,
        app_bytes=16 * GIB - 4_000_000_000,
        metal_bytes=11_453_250_000,
        plain_bytes=None,
        estimate=False,
        source="recommendedMaxWorkingSetSize 11,453.25 MB, two thirds of memory, in llama.cpp's logs (12,713.12 MB on M4 with newer macOS); that macOS "
        "takes 4 GB is an estimate, and leaves more than that",
    ),
    Device(
        "ipad-air",
        "iPad Air, 8 GB",
        8 * GIB,
        app_bytes=6_000_000_000,
        metal_bytes=None,
        plain_bytes=5_000_000_000,
        estimate=True,
        source=f"taken from the iPad Pro of the same memory: 6 GB by {_ARTSTUDIO}, {_IPAD_PLAIN}; {_IPAD_REGRESSION}",
    ),
    Device(
        "ipad-pro-8gb",
        "iPad Pro, 8 GB",
        8 * GIB,
        app_bytes=6_000_000_000,
        metal_bytes=None,
        plain_bytes=5_000_000_000,
        estimate=False,
        source=f"6 GB by {_ARTSTUDIO}, {_IPAD_PLAIN}; {_IPAD_REGRESSION}",
    ),
    Device(
        "ipad-pro-16gb",
        "iPad Pro, 16 GB",
        16 * GIB,
        app_bytes=12_000_000_000,
        metal_bytes=None,
        plain_bytes=5_000_000_000,
        estimate=False,
        source=f"12 GB by {_ARTSTUDIO}, {_IPAD_PLAIN}",
    ),
    Device(
        "iphone-15",
        "iPhone 15, 6 GB",
        6 * GIB,
        app_bytes=4_200_000_000,
        metal_bytes=None,
        plain_bytes=3_120_000_000,
        estimate=True,
        source="taken from the iPhone 13 Pro, also 6 GB: 4.20 GB available with the entitlement, 3.12 GB without (github.com/a-ghorbani/pocketpal-ai/pull/651)",
    ),
    Device(
        "iphone-15-pro",
        "iPhone 15 Pro, 8 GB",
        8 * GIB,
        app_bytes=6_000_000_000,
        metal_bytes=5_726_630_000,
        plain_bytes=3_000_000_000,
        estimate=False,
        source="os_proc_available_memory 6 GB with the entitlement, 3 GB without (github.com/introlab/rtabmap/pull/1446); recommendedMaxWorkingSetSize "
        "5,726.63 MB in llama.cpp's log of an A17 Pro",
    ),
    Device(
        "iphone-17-pro",
        "iPhone 17 Pro, 12 GB",
        12 * GIB,
        app_bytes=6144 * 2**20,
        metal_bytes=None,
        plain_bytes=3_000_000_000,
        estimate=True,
        source="no more than 6 GB on iPhone 17s for all their memory (github.com/ml-explore/mlx-swift-lm/pull/343), jetsam's limit as reported 6,144 MB "
        "(github.com/ml-explore/mlx-swift-lm/issues/209); 3 GB without the entitlement is taken from the iPhone 15 Pro",
    ),
)


def find(name: str) -> Device:
    """The device of that name, in capitals or not.

    Raises:
        UserError: there is none; the message lists those there are.
    """
    found = next((device for device in DEVICES if device.name == name.lower()), None)
    if found is None:
        raise UserError(f"no device is called {name}; there are {', '.join(device.name for device in DEVICES)}")
    return found


def verdict(device: Device, used_bytes: int) -> str:
    """Whether it "fits", is "tight" (over four fifths of the limit) or "does not fit"."""
    return judged(device.limit_bytes, used_bytes)


def judged(limit_bytes: int, used_bytes: int) -> str:
    """The same for any limit."""
    if used_bytes > limit_bytes:
        return "does not fit"
    return "tight" if used_bytes > TIGHT * limit_bytes else "fits"
