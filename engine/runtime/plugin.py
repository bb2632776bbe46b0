"""SGLang's two entry points into this project, named in pyproject.toml.

Both stay out of processes that were not started by ``launch.py``, so an environment with
this package installed still runs SGLang as it is.
"""

from engine.runtime.settings import from_environment


def activate_platform() -> str | None:
    """Offer the CPU platform where no GPU is present; None leaves the choice to SGLang."""
    import torch

    return None if torch.cuda.is_available() else "engine.runtime.platform.CpuPlatform"


def register_hooks() -> None:
    """Put our scheduler and our guards in place of SGLang's, in whatever process this is."""
    settings = from_environment()
    if settings is None:
        return
    from engine.runtime import overrides

    overrides.install(settings)
