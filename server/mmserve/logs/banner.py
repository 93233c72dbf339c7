"""What the server says first."""

from __future__ import annotations

from mmserve import __version__
from mmserve.config.report import mask_urls
from mmserve.config.settings import Settings


def start_banner(
    settings: Settings,
    *,
    home: str,
    directory: str,
    temp: str,
    python: str,
    config_file: str | None,
    gpus: int,
    cpus: int,
) -> str:
    """The lines of Multi Model Server's banner (`ConfigManager.dumpConfigurations`) that have a
    meaning without a JVM, in its order. Begins with an empty line, as there.

    Args:
        home: directory of the package.
        config_file: None where there is none.
    """
    facts = {
        "Version": f"mmserve {__version__}",
        "MMS Home": home,
        "Current directory": directory,
        "Temp directory": temp,
        "Number of GPUs": gpus,
        "Number of CPUs": cpus,
        "Python executable": python,
        "Config file": config_file or "N/A",
        "Inference address": settings.inference_address,
        "Management address": settings.management_address,
        "Model Store": settings.model_store or "N/A",
        "Initial Models": mask_urls(settings.load_models or "N/A"),
        "Log dir": settings.log_location,
        "Metrics dir": settings.metrics_location,
        "Default workers per model": settings.startup_workers,
        "Blacklist Regex": settings.blacklist_env_vars or "N/A",
        "Maximum Response Size": settings.max_response_size,
        "Maximum Request Size": settings.max_request_size,
        "Preload model": str(settings.preload_model).lower(),
    }
    return "\n" + "\n".join(f"{name}: {value}" for name, value in facts.items())
