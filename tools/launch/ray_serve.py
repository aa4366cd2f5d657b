"""Serve a model on Ray Serve: a checkpoint, or the folder of an exported Hugging Face model.

python tools/launch/ray_serve.py runs/tuned/checkpoints --replicas 1:4
curl http://127.0.0.1:8000/v1/completions -d '{"prompt": "import ", "stream": true}'

Answers the completions of OpenAI's API, of prompts and, if there is a chat template, of chats; as
server-sent events if asked for. A replica answers one request at a time, and there are as many as
requests wait, between MIN and MAX. Requests that find --queue others waiting are refused at once
(status 503). Listens on this machine's loopback. Needs the extra `ray`.
"""

from __future__ import annotations

import argparse
import signal
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megaframe.checkpoint import ACCEPTED_PATHS
from megaframe.distributed.ray_cluster import connect_to_ray
from megaframe.errors import UserError, report_errors
from megaframe.extensions import add_extension_option, load_named_extensions
from megaframe.io.closed_output import allow_closed_output
from megaframe.io.http import LOOPBACK
from megaframe.io.untrusted import make_integer_parser
from megaframe.run_queue.run_process import parse_ranks

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

    from megaframe.inference.model import Model

HEALTH = "/health"
_CONFIG, _TOKENIZER = "config.json", "tokenizer.json"


def main() -> None:
    """Check the command line, start the replicas, and serve until interrupted."""
    arguments = parse_arguments()
    with report_errors():
        options = {name: getattr(arguments, name) for name in ("ema", "tokenizer", "extension")}
        options["device"] = "cuda" if arguments.gpus else "cpu"
        options["most_tokens"] = arguments.tokens
        load_served_model(arguments.model, **options)  # a mistake is said here, not by replicas
        connect_to_ray(arguments.address)
        start(arguments, options)
        print(f"serving on http://{arguments.host}:{arguments.port}", flush=True)
        wait_for_signal()
        from ray import serve

        serve.shutdown()


def start(arguments: argparse.Namespace, options: dict[str, Any]) -> None:
    """Start proxy and replicas, and wait until the first ones answer.

    Raises:
        UserError: They cannot be started.
    """
    from ray import serve

    least, most = parse_ranks(arguments.replicas)
    device = {"num_gpus": 1.0} if arguments.gpus else {}
    deployment = serve.deployment(
        ModelReplica,
        name="model",
        max_ongoing_requests=1,
        max_queued_requests=arguments.queue,
        autoscaling_config={
            "min_replicas": least,
            "max_replicas": most,
            "target_ongoing_requests": 1.0,
        },
        ray_actor_options={"num_cpus": arguments.cpus, **device},
    )
    http = {"host": arguments.host, "port": arguments.port}
    try:
        serve.start(proxy_location="HeadOnly", http_options=http)
        serve.run(deployment.bind(arguments.model, options), name="megaframe")
    except RuntimeError as error:
        raise UserError(f"the model cannot be served: {str(error).splitlines()[0]}") from None


def wait_for_signal() -> None:
    """Return when SIGTERM or SIGINT has arrived."""
    asked = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: asked.set())
    asked.wait()


def load_served_model(
    location: str, *, ema: bool, tokenizer: str | None, extension: list[str], device: str, **_: Any
) -> Model:
    """Return the model at a location: a checkpoint, or a folder in the format of Hugging Face.

    Args:
        location: Path or URL.
        ema: Whether to use averages of weights (`optim.ema`).
        tokenizer: KIND:PATH; None for that of the run or the folder.
        extension: Extensions to load first.
        device: Where to put the weights.

    Raises:
        UserError: There is no model, or it cannot be read.
    """
    from megaframe.checkpoint.convert.huggingface.model_folder import import_model
    from megaframe.inference.library import load_model

    load_named_extensions(extension)
    folder = Path(location)
    if not (folder / _CONFIG).exists():
        return load_model(location, ema=ema, tokenizer=tokenizer, device=device)
    if tokenizer is None and (folder / _TOKENIZER).exists():
        tokenizer = f"hf:{folder / _TOKENIZER}"
    with tempfile.TemporaryDirectory() as temporary:
        import_model(folder, Path(temporary) / "checkpoints")
        return load_model(temporary, tokenizer=tokenizer, device=device)


class ModelReplica:
    """A replica: one process with the whole model.

    Args:
        location: Of the model.
        options: Of `load_served_model`, and the most tokens of an answer.
    """

    def __init__(self, location: str, options: dict[str, Any]) -> None:
        self._model = load_served_model(location, **options)
        self._name, self._most_tokens = Path(location).name, options["most_tokens"]

    def check_health(self) -> None:
        """Raise if the model does not compute numbers; Ray then replaces this replica."""
        if not self._model.logits([0]).isfinite().all():
            raise RuntimeError("the model's scores are not finite")

    async def __call__(self, request: Request) -> Response:
        """Answer a request."""
        from starlette.concurrency import run_in_threadpool
        from starlette.responses import JSONResponse

        from megaframe.inference.completions import CHATS, PROMPTS, describe_error

        path = request.url.path
        if path == HEALTH:
            return JSONResponse({"model": self._name})
        if path not in (PROMPTS, CHATS) or request.method != "POST":
            paths = f"GET {HEALTH}, POST {PROMPTS} and POST {CHATS}"
            return JSONResponse(describe_error(f"there are {paths} only"), 404)
        try:
            return await run_in_threadpool(self._complete, path, await request.body())
        except UserError as error:
            return JSONResponse(describe_error(str(error)), 400)

    def _complete(self, path: str, body: bytes) -> Response:
        from starlette.responses import JSONResponse, StreamingResponse

        from megaframe.inference.completions import EVENT_STREAM, Completion, read_request

        request = read_request(path, body, self._most_tokens)
        completion = Completion(self._model, request, self._name)
        if request.stream:
            return StreamingResponse(completion.stream(), media_type=EVENT_STREAM)
        return JSONResponse(completion.read())


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add, positive = parser.add_argument, make_integer_parser(1)
    add("model", help=f"{ACCEPTED_PATHS}; or the folder of a Hugging Face model")
    add("--replicas", default="1", metavar="N|MIN:MAX", help="default: 1")
    add("--queue", type=positive, default=64, help="requests that may wait; others get status 503")
    add("--tokens", type=positive, default=1000, help="that a request may ask for")
    add("--cpus", type=positive, default=1, help="of a replica")
    add("--gpus", action="store_true", help="a GPU for each replica")
    add("--ema", action="store_true", help="use averages of weights (optim.ema)")
    add("--tokenizer", help="KIND:PATH; default: that of the run or the folder")
    add("--host", default=LOOPBACK, help="by default only this machine can reach it")
    add("--port", type=make_integer_parser(1, 65535), default=8000, help="default: 8000")
    add("--address", default="auto", help="of the Ray cluster; local makes one here")
    add_extension_option(parser)
    return parser.parse_args()


if __name__ == "__main__":
    with allow_closed_output():
        main()
