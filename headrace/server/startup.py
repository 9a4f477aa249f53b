"""Loads the tokenizer and prompt templates while the engine starts."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from time import monotonic

from headrace.backend import lower_program
from headrace.checkpoint.fingerprint import fingerprint, weights_digest
from headrace.config import EngineConfig
from headrace.errors import HeadraceError
from headrace.loader.drafts import model_program
from headrace.loader.load import open_model, open_prompt_reader
from headrace.prompts import PromptReader
from headrace.remote.engine import RemoteEngine
from headrace.remote.errors import EngineDeadError, EngineStartError
from headrace.server.metrics import Metrics
from headrace.server.output_parsers.parser import OutputFormat
from headrace.server.settings import Settings
from headrace.server.state import ServerState
from headrace.server.step_roofline import StepRoofline
from headrace.server.step_watch import StepWatch

_NEWS_SECONDS = 30.0

_log = logging.getLogger("headrace.server")


@asynccontextmanager
async def start_server(
    model: str, config: EngineConfig, settings: Settings, engine: RemoteEngine
) -> AsyncIterator[ServerState]:
    """Start the engine and yield the state of the routes.

    Raises the errors of `load_model`, and EngineStartError.
    """
    starting = asyncio.ensure_future(engine.start())
    prompt_reader: PromptReader | None = None
    try:
        checkpoint = await asyncio.to_thread(open_model, model, config)
        tokenizer = await asyncio.to_thread(checkpoint.load_tokenizer)
        prompt_reader = open_prompt_reader(model, checkpoint, tokenizer)
        advised = {} if settings.ignore_advised_sampling else checkpoint.advised_sampling()
        templates = "\n".join(prompt_reader.templates.values())
        output_format = OutputFormat.of(
            templates, settings.tool_call_parser, settings.reasoning_parser
        )
        prompt_reader.describes_tools = output_format.is_generic
        program = await asyncio.to_thread(model_program, config, checkpoint)
        model_fingerprint = weights = ""
        if settings.worker:
            model_fingerprint = await asyncio.to_thread(fingerprint, checkpoint, tokenizer)
            weights = await asyncio.to_thread(weights_digest, checkpoint)

        await _wait_for_engine(starting, engine)
        assert engine.info is not None, "a started engine has sent its info"
        prompt_reader.max_model_len = engine.info.max_model_len
        lowered = lower_program(engine.info.backend, program, checkpoint.tensors)
        del checkpoint  # closes its files
        watch = await asyncio.to_thread(StepWatch, lowered, engine.info)
        yield ServerState(
            settings=settings,
            engine=engine,
            prompt_reader=prompt_reader,
            tokenizer=tokenizer,
            advised_sampling=advised,
            output_format=output_format,
            metrics=Metrics(engine, settings.model_name, watch, settings.price),
            roofline=StepRoofline(lowered, engine.info),
            watch=watch,
            fingerprint=model_fingerprint,
            weights_digest=weights,
        )
    finally:
        starting.cancel()
        with suppress(asyncio.CancelledError, HeadraceError):
            await starting
        await engine.close()
        if prompt_reader:
            prompt_reader.close()


async def _wait_for_engine(starting: asyncio.Future[None], engine: RemoteEngine) -> None:
    begun = monotonic()
    try:
        while not (await asyncio.wait([starting], timeout=_NEWS_SECONDS))[0]:
            _log.info("still loading after %.0f s", monotonic() - begun)
        await starting
    except EngineDeadError as error:
        raise EngineStartError(str(error), engine.exit_code) from None
