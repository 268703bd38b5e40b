"""A server that speaks vLLM's and SGLang's HTTP on loopback, samples from a real tiny model, and misbehaves on command.

In this process (``with ScriptedServer(...) as server``), with a table of numbers for a model, or on its own
(``python scripted_server.py --model FOLDER --port 8000``), with vLLM's arguments and a transformers model.

``POST /script-faults {"clamp": 1}`` makes the next call misbehave once; -1 is every call. ``GET /script-log`` lists the
calls and control requests that were answered.
"""

from __future__ import annotations

import argparse
import base64
import copy
import http.server
import inspect
import json
import os
import socket
import struct
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import parse_qs, urlsplit

import numpy as np

FAULTS = (
    *("no_ids", "no_logprobs", "some_logprobs", "clamp", "early_stop", "error", "busy", "hang", "reset", "abort"),
    *("other_prompt", "not_json", "die", "stale_head", "stale_weights", "stale_cache", "no_reset", "wide_vocabulary"),
    *("narrow_vocabulary", "other_tokenizer", "shifted", "refuse_weights", "no_experts", "more_layers"),
)
LOADING = threading.Lock()  # transformers patches its classes while it loads: two at once leave them so
OLD_NAME = "past_key_values"
CALLS = ("/v1/completions", "/inference/v1/generate", "/generate")
BLOCK = 128  # tokens of a cache block
HANG_S = 30.0


class Table:
    """A model of one table: the next token depends on the last one, on the length, and on the weights' number."""

    def __init__(self, vocab_size: int = 32) -> None:
        self.vocab_size, self.number = vocab_size, 0.0

    def load(self, folder: str, faults: Mapping[str, int]) -> None:
        if "stale_weights" not in faults:
            self.number = float(Path(folder, "number").read_text())

    def logits(self, ids: Sequence[int], faults: Mapping[str, int]) -> np.ndarray:
        return np.sin(np.arange(self.vocab_size) * (1.7 + ids[-1] + 0.1 * self.number) + 0.3 * len(ids)) * 2.0

    def experts(self, ids: Sequence[int]) -> np.ndarray:
        """[T - 1, L, X] What the routers of 2 layers with 8 experts chose for all tokens but the last."""
        first_TL = (np.asarray(ids[:-1])[:, None] + 3 * np.arange(2)) % 8
        return np.stack([first_TL, (first_TL + 1) % 8], axis=2)

    def forget(self) -> None:
        pass

    def tokens(self, text: str) -> list[int]:
        return [ord(character) % self.vocab_size for character in text]


class Transformers:
    """A causal LM of a folder, with a prefix cache of whole blocks and vLLM's faults on the CPU."""

    def __init__(self, folder: str) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self._torch, self._auto = torch, AutoModelForCausalLM
        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        self._model: Any = self._read(folder)
        # transformers renamed it
        self._cache_argument = "cache" if "cache" in inspect.signature(self._model.forward).parameters else OLD_NAME
        self._is_tied = bool(self._model.config.tie_word_embeddings)
        self.vocab_size = int(self._model.config.vocab_size)
        self._lock = threading.Lock()
        self._prefixes: dict[tuple[int, ...], Any] = {}

    def _read(self, folder: str) -> Any:
        with LOADING:
            return self._auto.from_pretrained(folder, dtype=self._torch.float32).eval()

    def load(self, folder: str, faults: Mapping[str, int]) -> None:
        if "stale_weights" in faults:
            return
        with self._lock:
            head = self._model.get_output_embeddings().weight.detach().clone()
            self._model = self._read(folder)
            if "stale_head" in faults and self._is_tied:
                self._model.get_output_embeddings().weight = self._torch.nn.Parameter(head)

    def forget(self) -> None:
        self._prefixes.clear()

    def logits(self, ids: Sequence[int], faults: Mapping[str, int]) -> np.ndarray:
        torch = self._torch
        with self._lock, torch.no_grad():
            num_cached = (len(ids) - 1) // BLOCK * BLOCK
            cache = None
            if num_cached:
                prefix = tuple(ids[:num_cached])
                if prefix not in self._prefixes:
                    output = self._model(input_ids=torch.tensor([prefix]), use_cache=True)
                    self._prefixes[prefix] = output.past_key_values
                cache = copy.deepcopy(self._prefixes[prefix])
            rest = torch.tensor([list(ids[num_cached:])])
            found = self._model(input_ids=rest, use_cache=True, **{self._cache_argument: cache})
            return found.logits[0, -1].double().numpy()

    def experts(self, ids: Sequence[int]) -> np.ndarray:
        with self._lock, self._torch.no_grad():
            found = self._model(input_ids=self._torch.tensor([list(ids[:-1])]), output_router_logits=True)
            num_experts = self._model.config.num_experts_per_tok
            chosen = [logits_TE.topk(num_experts).indices for logits_TE in found.router_logits]
            return self._torch.stack(chosen, dim=1).numpy()

    def tokens(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)


class ScriptedServer:
    """One server; see the module."""

    def __init__(
        self,
        model: Any = None,
        *,
        kind: str = "vllm",
        port: int = 0,
        max_model_len: int = 512,
        dtype: str = "float32",
        logprobs_mode: str = "processed_logprobs",
        has_dev_routes: bool = True,
        has_scale_out: bool = False,
        seconds_per_token: float = 0.0,
        faults: Mapping[str, int] | None = None,
        key: str | None = None,
    ) -> None:
        self.model = model if model is not None else Table()
        self.kind, self.max_model_len, self.dtype, self.logprobs_mode = kind, max_model_len, dtype, logprobs_mode
        self.has_dev_routes, self.seconds_per_token, self.key = has_dev_routes, seconds_per_token, key
        self.has_scale_out = has_scale_out
        self.faults: dict[str, int] = dict(faults or {})
        self.stamp = "default"
        self.log: list[dict[str, Any]] = []
        self.most_in_flight = 0
        self.num_questions = 0  # for the stamp
        self._state = threading.Condition()
        self._in_flight, self._is_paused = 0, False
        handler = type("Handler", (_Handler,), {"script": self})
        self._http = _Http(("127.0.0.1", port), handler)
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"

    def __enter__(self) -> ScriptedServer:
        threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._http.shutdown()
        self._http.end_connections()
        self._http.server_close()

    def serve(self) -> None:
        self._http.serve_forever(poll_interval=0.05)

    @property
    def calls(self) -> list[dict[str, Any]]:
        return [entry for entry in self.log if entry["path"] in CALLS]

    def takes(self, fault: str) -> bool:
        """Whether this request has a fault; one that was asked for a number of times is used up."""
        with self._state:
            left = self.faults.get(fault, 0)
            if left > 0:
                self.faults[fault] = left - 1
                if left == 1:
                    del self.faults[fault]
            return left != 0

    # --- generation -----------------------------------------------------------------------------------------------

    def sample(
        self, ids: Sequence[int], parameters: Mapping[str, Any], most: int
    ) -> tuple[list[int], list[float], str]:
        """(ids, log-probs, reason): inverse CDF with numbers of the seed alone."""
        temperature, seed = parameters["temperature"], parameters["seed"]
        numbers = np.random.Generator(np.random.Philox(key=seed)).random(most) if most > 0 else []
        context, output, logprobs = list(ids), list[int](), list[float]()
        for number in numbers:
            raw = np.asarray(self.model.logits(context, self.faults), dtype=np.float64)
            scaled = _log_softmax(raw / (temperature or 1.0))
            if temperature:
                token = min(int(np.searchsorted(np.cumsum(np.exp(scaled)), number, side="right")), len(raw) - 1)
            else:
                token = int(raw.argmax())
            given = scaled if self.logprobs_mode == "processed_logprobs" else _log_softmax(raw)
            context.append(token)
            output.append(token)
            logprobs.append(float(given[token]) + (-0.05 if "shifted" in self.faults else 0.0))
            if self.seconds_per_token:
                time.sleep(self.seconds_per_token)
            if token in parameters["stop"]:
                return output, logprobs, "stop"
        return output, logprobs, "length"

    def begin(self) -> None:
        with self._state:
            self._state.wait_for(lambda: not self._is_paused)
            self._in_flight += 1
            self.most_in_flight = max(self.most_in_flight, self._in_flight)

    def end(self) -> None:
        with self._state:
            self._in_flight -= 1
            self._state.notify_all()

    def pause(self) -> None:
        with self._state:
            self._is_paused = True
            self._state.wait_for(lambda: self._in_flight == 0)

    def resume(self) -> None:
        with self._state:
            self._is_paused = False
            self._state.notify_all()


class _Http(http.server.ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 256

    def __init__(self, *args: Any) -> None:
        self._open: set[socket.socket] = set()
        super().__init__(*args)

    def process_request(self, request: Any, client_address: Any) -> None:
        self._open.add(request)
        super().process_request(request, client_address)

    def end_connections(self) -> None:
        """What a process that dies does to those who wait for it."""
        for connection in list(self._open):
            _reset(connection)

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # clients that go away are part of the play


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1
    script: ClassVar[Any]

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._route({})

    def do_POST(self) -> None:
        length = int(self.headers.get("content-length") or 0)
        self._route(json.loads(self.rfile.read(length)) if length else {})

    def _route(self, body: dict[str, Any]) -> None:
        script, parts = self.script, urlsplit(self.path)
        if parts.path.startswith("/script-"):
            if parts.path == "/script-faults":
                script.faults.update(body)
            return self._answer({"log": script.log, "most_in_flight": script.most_in_flight})
        if script.key is not None and self.headers.get("authorization") != f"Bearer {script.key}":
            return self._answer({"error": {"message": "Unauthorized"}}, 401)
        if parts.path == "/health":
            return self._answer(None)
        routes = self._vllm if script.kind == "vllm" else self._sglang
        routes(parts.path, parse_qs(parts.query), body)

    # --- vLLM -----------------------------------------------------------------------------------------------------

    def _vllm(self, path: str, query: dict[str, list[str]], body: dict[str, Any]) -> None:
        script = self.script
        if path == "/v1/models":
            return self._answer({"data": [{"id": "policy", "max_model_len": script.max_model_len}]})
        if path == "/tokenize":
            return self._answer({"tokens": self._tokens(body["prompt"])})
        if path == "/v1/completions":
            return self._complete(body, body["prompt"], body["max_tokens"], body)
        if path == "/inference/v1/generate":
            if not script.has_scale_out:
                return self._answer({"error": {"message": "Scale-out endpoints are disabled"}}, 403)
            if "token_ids" not in body:
                return self._answer({"error": {"message": "Field required"}}, 400)
            parameters = body["sampling_params"]
            return self._complete(body, body["token_ids"], parameters["max_tokens"], parameters)
        if script.has_dev_routes:
            if path == "/server_info":
                model = {"dtype": f"torch.{script.dtype}", "logprobs_mode": script.logprobs_mode}
                return self._answer({"vllm_config": {"model_config": model}})
            if path == "/weight_info":
                script.num_questions += 1
                return self._answer({"weight_version": script.stamp})
            if path == "/pause" and query == {"mode": ["wait"]}:
                script.pause()
                return self._done(path, body, {"status": "paused"})
            if path == "/resume":
                script.resume()
                return self._done(path, body, {"status": "resumed"})
            if path == "/collective_rpc" and body["method"] == "reload_weights":
                if script.takes("refuse_weights"):
                    return self._answer({"error": {"message": "size mismatch for lm_head"}}, 500)
                script.model.load(body["kwargs"]["weights_path"], script.faults)
                return self._done(path, body, {"results": [None]})
            if path == "/reset_prefix_cache":
                if script.takes("no_reset"):
                    return self._answer({"success": False})
                if "stale_cache" not in script.faults:
                    script.model.forget()
                return self._done(path, body, {"success": True})
            if path == "/update_weight_version":
                script.stamp = body["new_version"]
                return self._done(path, body, {"success": True})
        return self._answer({"detail": "Not Found"}, 404)

    # --- SGLang ---------------------------------------------------------------------------------------------------

    def _sglang(self, path: str, query: dict[str, list[str]], body: dict[str, Any]) -> None:
        script = self.script
        if path == "/get_model_info":
            return self._answer({"model_path": "m", "is_generation": True, "weight_version": script.stamp})
        if path == "/get_server_info":
            return self._answer({"dtype": script.dtype, "context_length": script.max_model_len})
        if path == "/tokenize":
            return self._answer({"tokens": self._tokens(body["prompt"])})
        if path == "/generate":
            parameters = body["sampling_params"]
            seed = {"seed": parameters.get("sampling_seed")}
            return self._complete(body, body["input_ids"], parameters["max_new_tokens"], {**parameters, **seed})
        if path == "/update_weights_from_disk":
            if script.takes("refuse_weights"):
                return self._answer({"success": False, "message": "no such folder"}, 400)
            script.pause()
            script.model.load(body["model_path"], script.faults)
            if body["flush_cache"] and "stale_cache" not in script.faults:
                script.model.forget()
            script.stamp = body["weight_version"]
            script.resume()
            return self._done(path, body, {"success": True, "message": ""})
        return self._answer({"detail": "Not Found"}, 404)

    # --- both -----------------------------------------------------------------------------------------------------

    def _tokens(self, text: str) -> list[int]:
        found = self.script.model.tokens(text)
        return found[1:] if self.script.takes("other_tokenizer") else found

    def _complete(self, body: dict[str, Any], ids: list[int], most: int, given: dict[str, Any]) -> None:
        script = self.script
        script.begin()
        try:
            self._complete_now(body, ids, most, given)
        finally:
            script.end()

    def _complete_now(self, body: dict[str, Any], ids: list[int], most: int, given: dict[str, Any]) -> None:
        script = self.script
        top = script.model.vocab_size + ("wide_vocabulary" in script.faults) - ("narrow_vocabulary" in script.faults)
        if max(ids) >= top:
            return self._answer({"error": {"message": f"Token id {max(ids)} is out of vocabulary"}}, 400)
        if script.takes("error"):
            return self._answer({"error": {"message": "CUDA error: an illegal memory access"}}, 500)
        if script.takes("busy"):
            return self._answer({"error": {"message": "overloaded"}}, 503)
        if script.takes("hang"):
            time.sleep(HANG_S)
        if script.takes("die"):
            os._exit(9)
        room = script.max_model_len - len(ids)
        if room < 1:
            return self._answer({"error": {"message": "the prompt is longer than the model's context"}}, 400)
        most = min(most, room)
        if script.takes("clamp"):
            most //= 2
        stops = given.get("stop_token_ids", []) if given.get("ignore_eos") else [2]
        parameters = {"temperature": given["temperature"], "seed": given.get("seed"), "stop": stops}
        stamp = script.stamp  # weights change while no call runs, or by a script in the middle of one
        output, logprobs, reason = script.sample(ids, parameters, most)
        if script.takes("early_stop"):
            output, logprobs, reason = output[:1], logprobs[:1], "stop"
        if script.takes("abort"):
            reason = "abort"
        shown = ids[:-1] if script.takes("other_prompt") else ids
        shown_logprobs: Any = None if script.takes("no_logprobs") else logprobs
        if script.takes("some_logprobs"):
            shown_logprobs = [None, *logprobs[1:]]
        hides_ids = script.takes("no_ids")
        choice: dict[str, Any]
        found: dict[str, Any]
        if self.path == "/inference/v1/generate":
            choice = {"index": 0, "finish_reason": reason, "token_ids": None if hides_ids else output}
            choice["weight_versions"] = [{"version": stamp, "start": 0, "end": len(output)}]
            if shown_logprobs is not None:
                pairs = zip(output, shown_logprobs, strict=True)
                choice["logprobs"] = {"content": [{"token_id": a, "logprob": b} for a, b in pairs]}
            found = {"choices": [choice], "prompt_token_ids": shown}
        elif script.kind == "vllm":
            choice = {"index": 0, "text": "?" * len(output), "finish_reason": reason}
            choice["logprobs"] = None if shown_logprobs is None else {"token_logprobs": shown_logprobs}
            if body.get("return_token_ids") and not hides_ids:
                choice |= {"token_ids": output, "prompt_token_ids": shown}
            found = {"object": "text_completion", "choices": [choice]}
        else:
            meta: dict[str, Any] = {"finish_reason": {"type": reason}, "prompt_tokens": len(shown)}
            if body.get("return_routed_experts") and not script.takes("no_experts"):
                experts_TLX = script.model.experts([*ids, *output])
                if script.takes("more_layers"):
                    experts_TLX = experts_TLX.repeat(2, axis=1)
                meta["routed_experts"] = base64.b64encode(experts_TLX.astype("<i4").tobytes()).decode()
            if shown_logprobs is not None:
                meta["output_token_logprobs"] = [[a, b, None] for a, b in zip(shown_logprobs, output, strict=True)]
            found = {"text": "?", "meta_info": meta} | ({} if hides_ids else {"output_ids": output})
        self._done(self.path, body, found)

    def _done(self, path: str, body: dict[str, Any], found: Any) -> None:
        if self.script.takes("reset") and path in CALLS:
            self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 4000\r\n\r\n{")
            self.wfile.flush()
            _reset(self.connection)
            self.close_connection = True
            return
        self.script.log.append({"path": path, "body": body, "stamp": self.script.stamp, "answer": found})
        self._answer(found)

    def _answer(self, found: Any, status: int = 200) -> None:
        data = b"" if found is None else json.dumps(found).encode()
        if found is not None and self.path in CALLS and self.script.takes("not_json"):
            data = b"<html>proxy</html>"
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def _reset(connection: socket.socket) -> None:
    """Close so that the other side sees a reset."""
    try:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # it is closed


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max()
    return shifted - np.log(np.exp(shifted).sum())


def main(arguments: Sequence[str] | None = None) -> None:
    """Serve a transformers model until the process is ended, with vLLM's arguments."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--kind", default="vllm")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--max-model-len", type=int, default=512)
    parser.add_argument("--max-num-seqs", type=int, default=64)
    parser.add_argument("--logprobs-mode", default="processed_logprobs")
    parser.add_argument("--served-model-name", default="policy")
    parser.add_argument("--generation-config", default="vllm")
    parser.add_argument("--enforce-eager", action="store_true")
    parser.add_argument("--enable-scale-out", action="store_true")
    parser.add_argument("--seconds-per-token", type=float, default=0.0)
    parser.add_argument("--fault", action="append", default=[], choices=FAULTS)
    options = parser.parse_args(arguments)
    import torch

    torch.set_num_threads(1)
    ScriptedServer(
        Transformers(options.model),
        kind=options.kind,
        port=options.port,
        max_model_len=options.max_model_len,
        dtype=options.dtype,
        logprobs_mode=options.logprobs_mode,
        has_scale_out=options.enable_scale_out,
        seconds_per_token=options.seconds_per_token,
        faults=dict.fromkeys(options.fault, -1),
    ).serve()


if __name__ == "__main__":
    main()
