"""The front: wires the rooms together and serves until it is told to stop.

`python -I -m mmserve.serve com.amazonaws.ml.mms.ModelServer [flags]`
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import re
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

from mmserve import platform
from mmserve.config import report
from mmserve.config.launch import (
    Arguments,
    announce_ready,
    parse_arguments,
    remove_own_pid_file,
    temp_dir,
)
from mmserve.config.load import Loaded, load_settings
from mmserve.config.report import mask_urls
from mmserve.config.settings import Settings
from mmserve.errors import ConfigurationError, ServeError
from mmserve.frontend.api import Api
from mmserve.frontend.edge import cors_of, limits_of
from mmserve.frontend.http import Application
from mmserve.frontend.listener import Listener, install_exception_handler, open_listener
from mmserve.frontend.tls import tls_of
from mmserve.logs.access import RequestLog
from mmserve.logs.banner import start_banner
from mmserve.logs.journal import Journal, open_journal
from mmserve.logs.output import OutputLine, worker_name
from mmserve.metrics.host import hostname
from mmserve.metrics.lines import worker_load_line
from mmserve.metrics.requests import RequestCounters
from mmserve.metrics.sampler import sample_host
from mmserve.models.fetching import Fetcher, open_fetcher
from mmserve.models.registry import Registry
from mmserve.models.startup import in_list
from mmserve.workers.launcher import Launcher
from mmserve.workers.worker import Worker
from mmserve.workers.zygote import DEFAULT_IMPORTS, Zygote

log = logging.getLogger("mmserve.serve")

T = TypeVar("T")

#: What stays of the stop timeout for cutting connections and ending processes.
_CUT_S = 1.0


def main(argv: Sequence[str] | None = None) -> int:
    """Serves; the exit status is 0 after a stop that was asked for."""
    try:
        arguments = parse_arguments(sys.argv[1:] if argv is None else argv)
        platform.open_standard_streams()
        platform.raise_open_files()
        if arguments.ready_fd is not None:
            os.set_inheritable(arguments.ready_fd, False)  # no child may keep a launcher waiting
        loaded = load_settings(arguments, os.environ)
        with open_journal(loaded.settings) as journal:
            journal.install_logging()
            return _run(Server(loaded, arguments, journal))
    except ConfigurationError as error:
        print(f"Invalid configuration: {error}", flush=True)
        return 1
    finally:
        remove_own_pid_file(os.environ)


def _run(server: Server) -> int:
    try:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            return runner.run(server.serve())
    except BaseExceptionGroup as group:
        for error in _leaves(group):
            if isinstance(error, ConfigurationError):
                raise error from None
        log.critical("the server ends on an error of its own", exc_info=group)
        return 1


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:  # an extra of speed, not of function
        return None
    return uvloop.new_event_loop


def _leaves(group: BaseExceptionGroup[BaseException]) -> list[BaseException]:
    found: list[BaseException] = []
    for error in group.exceptions:
        found += _leaves(error) if isinstance(error, BaseExceptionGroup) else [error]
    return found


class Server:
    """One front, from its settings to its end."""

    def __init__(self, loaded: Loaded, arguments: Arguments, journal: Journal) -> None:
        self._loaded, self._arguments, self._journal = loaded, arguments, journal
        self._settings = loaded.settings
        self._host = hostname()
        self._stops = 0
        self._stop_asked = asyncio.Event()
        self._hurry = asyncio.Event()

    async def serve(self) -> int:
        loop = asyncio.get_running_loop()
        install_exception_handler(loop)
        settings = self._settings
        self._say_hello()
        zygote = Zygote(preloaded(settings), os.environ)
        async with (
            asyncio.TaskGroup() as tasks,
            zygote.running(),
            open_fetcher(settings, temp_dir(os.environ)) as fetcher,
        ):
            self._watch_signals(loop)

            def spawn(work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
                return tasks.create_task(_guarded(work))

            registry = Registry(
                settings,
                fetcher,
                Launcher(
                    zygote,
                    self._log_output,
                    worker_start=settings.worker_start,
                    load_timeout_s=None if settings.debug else settings.load_timeout_s,
                    max_processes=_max_processes(settings),
                ),
                spawn=spawn,
                environ=os.environ,
                gpus=settings.number_of_gpu or 0,
                startup_workers=settings.startup_workers,
                on_metrics=self._log_metrics,
                on_ready=self._log_ready,
            )
            try:
                failed = await self._unless_stopped(self._load_startup_models(registry, fetcher))
                if failed is None:
                    return 0
                if failed and settings.fail_on_startup_error:
                    print(f"Failed to load at start: {', '.join(failed)}", flush=True)
                    return 1
                api = Api(settings, registry, spawn)
                sampler = tasks.create_task(self._sample_host())
                async with self._listeners(api) as listeners:
                    self._on_hangup(loop, listeners)
                    gc.freeze()  # what lives as long as the server need not be looked at again
                    self._journal.announce("Model server started.")
                    if self._arguments.ready_fd is not None and settings.log_to == "files":
                        self._journal.leave_stdout()  # a file that nobody rolls
                    announce_ready(self._arguments.ready_fd)
                    if settings.load_models and not settings.fail_on_startup_error:
                        spawn(self._sum_up_start(registry, failed))
                    await self._stop_asked.wait()
                    await self._stop(listeners, registry)
                sampler.cancel()
            finally:
                await registry.close(timeout_s=0)
        log.info("server stopped")
        return 0

    # Start

    def _say_hello(self) -> None:
        settings = self._settings
        banner = start_banner(
            settings,
            home=str(Path(__file__).parent),
            directory=str(Path.cwd()),
            temp=temp_dir(os.environ),
            python=sys.executable,
            config_file=self._loaded.file,
            gpus=settings.number_of_gpu or 0,
            cpus=settings.cpu_count,
        )
        self._journal.server(logging.INFO, log.name, banner)
        for line in report.lines(self._loaded):
            log.debug(line)
        for notice in self._loaded.notices:
            log.info(notice)
        for warning in self._loaded.warnings:
            log.warning(warning)

    async def _load_startup_models(self, registry: Registry, fetcher: Fetcher) -> list[str]:
        """Registers `load_models`; their workers come up meanwhile. The names that failed.

        Under `fail_on_startup_error` the workers are waited for.
        """
        settings = self._settings
        if not settings.load_models:
            return []
        try:
            entries = await fetcher.startup_models(settings.load_models)
        except ServeError as error:
            log.error("load_models cannot be read", extra={"cause": mask_urls(str(error))})
            for name, url in in_list(settings.load_models).models:
                registry.miss(name, url)
            return [mask_urls(settings.load_models)]
        failed = []
        for name, why in await registry.register_at_start(entries):
            shown, cause = mask_urls(name), mask_urls(str(why))
            log.warning("Failed to load model: %s", shown, extra={"cause": cause})
            failed.append(shown)
        if settings.fail_on_startup_error and not failed:
            failed = await registry.failed_to_start()
        return failed

    async def _sum_up_start(self, registry: Registry, failed: Sequence[str]) -> None:
        """One last line, once every model of the start has come up or failed."""
        failed = [*failed, *await registry.failed_to_start()]
        if failed:
            log.error("some start-up models failed", extra={"models": ", ".join(failed)})
        else:
            log.info("all start-up models are loaded")

    async def _unless_stopped(self, work: Coroutine[Any, Any, T]) -> T | None:
        """Does a part of the start; None where the server is told to stop before it is done."""
        working = asyncio.ensure_future(work)
        stop = asyncio.ensure_future(self._stop_asked.wait())
        try:
            await asyncio.wait({working, stop}, return_when=asyncio.FIRST_COMPLETED)
            return working.result() if working.done() else None
        finally:
            for task in (working, stop):
                task.cancel()
            await asyncio.wait({working, stop})

    @contextlib.asynccontextmanager
    async def _listeners(self, api: Api) -> AsyncIterator[list[Listener]]:
        settings = self._settings
        inference, management = settings.inference, settings.management
        tls = tls_of(settings)
        observe = RequestLog(self._journal, settings, RequestCounters(self._host)).observe
        is_shared = inference.same_listener(management)
        plan: list[tuple[str, Any, Application]] = [
            ("inference_address", inference, api.shared if is_shared else api.inference)
        ]
        if not is_shared:
            plan.append(("management_address", management, api.management))
        async with contextlib.AsyncExitStack() as stack:
            listeners = []
            for key, address, application in plan:
                listener = await stack.enter_async_context(
                    open_listener(
                        address,
                        application,
                        key=key,
                        limits=limits_of(settings),
                        cors=cors_of(settings),
                        observer=observe,
                        tls=tls,
                    )
                )
                listeners.append(listener)
                log.info("listening", extra={"key": key, "at": address.url, "port": listener.port})
            yield listeners

    # Signals

    def _watch_signals(self, loop: asyncio.AbstractEventLoop) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._asked_to_stop)

    def _asked_to_stop(self) -> None:
        """The first time politely; the second time at once."""
        self._stops += 1
        (self._stop_asked if self._stops == 1 else self._hurry).set()

    def _on_hangup(self, loop: asyncio.AbstractEventLoop, listeners: list[Listener]) -> None:
        def reread() -> None:
            self._journal.reopen()
            for listener in listeners:
                listener.reload_tls()

        loop.add_signal_handler(signal.SIGHUP, reread)

    async def _stop(self, listeners: list[Listener], registry: Registry) -> None:
        """Lets what runs and waits finish within `stop_timeout_seconds`."""
        limit_s = self._settings.stop_timeout_seconds
        log.info("stopping", extra={"limit_s": limit_s})
        deadline = time.monotonic() + limit_s + _CUT_S

        async def politely() -> None:
            await asyncio.gather(
                registry.close(timeout_s=limit_s),
                *(listener.drain(deadline) for listener in listeners),
            )

        stopping = asyncio.create_task(politely())
        hurry = asyncio.create_task(self._hurried())
        await asyncio.wait({stopping, hurry}, return_when=asyncio.FIRST_COMPLETED)
        for task in (stopping, hurry):
            task.cancel()
        await asyncio.wait({stopping, hurry})
        await registry.close(timeout_s=0)  # nothing is left to do where it ended politely

    async def _hurried(self) -> None:
        await self._hurry.wait()
        log.warning("stopping at once")

    # What is logged

    async def _sample_host(self) -> None:
        await sample_host(
            self._journal.metric,
            interval_s=self._settings.metric_time_interval,
            hostname=self._host,
        )

    def _log_output(self, worker: Worker, stream: str, lines: list[OutputLine]) -> None:
        name = worker_name(worker.model, worker.number)
        self._journal.model_lines(name, worker.pid or 0, stream, lines)

    def _log_metrics(self, lines: list[str]) -> None:
        for line in lines:
            self._journal.model_metric(line)

    def _log_ready(self, model: str, worker: Worker) -> None:
        port = int(worker.id.partition("-")[0])
        line = worker_load_line(
            model, port, worker.load_s, hostname=self._host, timestamp=int(time.time())
        )
        self._journal.metric(line)


def _max_processes(settings: Settings) -> int | None:
    """Half of what the system allows, where the settings do not say: handlers have children."""
    if settings.max_worker_processes is not None:
        return settings.max_worker_processes
    allowed = platform.process_limit()
    return max(1, allowed // 2) if allowed is not None else None


def preloaded(settings: Settings) -> list[str]:
    """Modules that the library imports, of those that are installed."""
    from importlib.util import find_spec

    named = settings.preload_imports
    if named == "none":
        return []
    names = DEFAULT_IMPORTS if named == "default" else re.split(r"\s*,\s*", named.strip())
    if named != "default":
        return [name for name in names if name]
    roots = {name: find_spec(re.split("[.:]", name)[0]) for name in names}
    return [name for name in names if roots[name] is not None]


async def _guarded(work: Coroutine[Any, Any, None]) -> None:
    """One task that fails must not take the others along: the server lives on."""
    try:
        await work
    except Exception:
        log.exception("a task failed")


if __name__ == "__main__":
    sys.exit(main())
