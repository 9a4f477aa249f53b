"""From the name of a model to what the routes work with: an engine, and beside it the reader of its
prompts.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from headrace.checkpoint.fingerprint import fingerprint
from headrace.config import EngineConfig
from headrace.errors import HeadraceError
from headrace.loader.load import open_model, read_prompts
from headrace.model import trace_model
from headrace.prompts import PromptReader
from headrace.remote.engine import ServedEngine
from headrace.remote.errors import EngineDeadError, EngineStartError
from headrace.server.metrics import Metrics
from headrace.server.output_parsers.parser import AnswerStyle
from headrace.server.roofline import Roofline
from headrace.server.served_model import ServedModel
from headrace.server.settings import Settings


@asynccontextmanager
async def served_model(
    model: str, config: EngineConfig, settings: Settings, engine: ServedEngine
) -> AsyncIterator[ServedModel]:
    """The model behind the routes; the engine is started while its prompts are made ready. All of
    it ends with the context.

    Raises the errors of `load_model`, and EngineStartError.
    """
    starting = asyncio.ensure_future(engine.start())
    prompts: PromptReader | None = None
    try:
        checkpoint = await asyncio.to_thread(open_model, model, config)
        tokenizer = await asyncio.to_thread(checkpoint.load_tokenizer)
        prompts = read_prompts(model, checkpoint, tokenizer)
        advised = {} if settings.ignore_advised_sampling else checkpoint.advised_sampling()
        templates = "\n".join(filter(None, (checkpoint.chat_template, checkpoint.tool_template)))
        style = AnswerStyle.of(templates, settings.tool_call_parser, settings.reasoning_parser)
        program = await asyncio.to_thread(trace_model, checkpoint.spec, checkpoint.tensors)
        mark = (
            await asyncio.to_thread(fingerprint, checkpoint, tokenizer) if settings.worker else ""
        )
        del checkpoint  # it keeps the file open
        await _started(starting, engine)
        assert engine.hello is not None, "it has started"
        roofline = await asyncio.to_thread(Roofline, program, engine.hello)
        metrics = Metrics(lambda: engine.report.figures, lambda: engine.restarts)
        yield ServedModel(
            settings, engine, prompts, tokenizer, advised, style, metrics, roofline, mark
        )
    finally:
        starting.cancel()
        with suppress(asyncio.CancelledError, HeadraceError):
            await starting
        await engine.close()
        if prompts:
            prompts.close()


async def _started(starting: asyncio.Future[None], engine: ServedEngine) -> None:
    try:
        await starting
    except EngineDeadError as error:
        raise EngineStartError(str(error), engine.exit_code) from None
