"""SGLang's CPU platform, out of tree: the CUDA build of SGLang runs on it without a GPU."""

from typing import Any

from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform


class CpuPlatform(CpuDeviceMixin, SRTPlatform):  # type: ignore[misc]  # SGLang is untyped
    """Torch-native kernels on the CPU.

    ``PlatformEnum.OOT`` and not ``CPU``: SGLang's own CPU path wants a build of ``sgl_kernel``
    that is not published, and it is chosen by the enum.
    """

    _enum = PlatformEnum.OOT
    capabilities = PlatformCapabilities()

    def get_default_attention_backend(self) -> str:
        return "torch_native"

    def get_dispatch_key_name(self) -> str:
        return "native"

    def is_pin_memory_available(self, device: Any = None) -> bool:
        return False

    def supports_fp8(self) -> bool:
        return False
