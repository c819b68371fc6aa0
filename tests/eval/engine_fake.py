"""A server of a toy recurrence that speaks as llama.cpp's does, with a slot for each conversation, and with faults on
request."""

import json
import math
import re
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

V = 60  # tokens: characters from code 32


def read(state, id):
    """The state after a token."""
    return [math.tanh(1.8 * state[i - 1] - x + math.sin((id + 1) * (i + 1))) for i, x in enumerate(state)]


def logits(state):
    return [sum(6 * x * math.cos((i + 1) * (v + 2)) for i, x in enumerate(state)) for v in range(V)]


def encode(text):
    return [min(max(ord(c) - 32, 0), V - 1) for c in text]


class Fake:
    """The server's memory. slots: what each has read. offers: routes and fields that are known."""

    def __init__(self, fault="", offers=("slots", "tokenize", "logprobs", "cache_prompt", "chat"), slots=2):
        self.fault, self.offers = fault, offers
        self.slots = [([], [0.0] * 4) for _ in range(slots)]
        self.files, self.locks = {}, [threading.Lock() for _ in range(slots)]
        self.restored, self.busy, self.count = [False] * slots, 0, 0
        self.next = 0

    def complete(self, ids, tokens, *, slot, cached, logprobs, temperature, seed):
        """The ids drawn, log-probabilities of all at each, tokens not read again."""
        if slot is None:
            self.next = slot = (self.next + 1) % len(self.slots)
        with self.locks[slot]:
            return self._complete(ids, tokens, slot, cached, logprobs, temperature, seed)

    def _complete(self, ids, tokens, slot, cached, logprobs, temperature, seed):
        known, state = self.slots[slot]
        shared = 0
        while cached and shared < min(len(known), len(ids) - 1) and known[shared] == ids[shared]:
            shared += 1
        if shared < len(known) or not cached:  # a rollback: from the first token, as a state cannot go back
            back, state = state, [0.0] * 4
            if self.fault == "forgets a rollback" and shared > 8:
                state = back
            else:
                for id in ids[:shared]:
                    state = read(state, id)
        elif self.restored[slot] and self.fault == "rereads after a restore":
            state = read(state, known[-1])
        noise = 1e-9 if self.restored[slot] and self.fault == "rounds after a restore" and shared else 0
        if self.restored[slot] and self.fault == "gives 500 after a restore":
            raise RuntimeError
        self.restored[slot] = False
        rest = ids[shared:]
        if self.fault == "drops a token" and shared and len(rest) > 1:
            rest = rest[1:]
        self.busy += 1
        time.sleep(0.01)
        for id in rest:
            state = read(state, id)
        drawn, told, known = [], [], list(ids)
        self.count += 1
        for _ in range(tokens):
            own = logits(state)
            if self.fault == "leaks between rows" and self.busy > 1:
                own = [x + 40 * (v % 7 == 0) for v, x in enumerate(own)]
            if self.fault == "logprobs change the answer" and logprobs is None:
                own[3] += 100
            if self.fault == "is random":
                own[self.count % V] += 3
            most = max(own)
            total = most + math.log(sum(math.exp(x - most) for x in own))
            all_of = [x - total + noise for x in own]
            if temperature:
                turn = seed + len(drawn) + (self.count if self.fault == "loses the seed" else 0)
                id = (int(1e4 * abs(state[0])) + turn) % V
            else:
                id = max(range(V), key=lambda v: all_of[v])
            if drawn:
                known.append(drawn[-1])
            drawn.append(id)
            told.append(all_of)
            if self.fault == "ends early" and len(drawn) == 2:
                break
            if len(drawn) < tokens:
                state = read(state, id)
                time.sleep(0.001)
        self.busy -= 1
        self.slots[slot] = known, state
        return drawn, told, shared


def handler(fake):
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_):
            pass

        def send(self, status, body):
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def refuse(self, words, status=400):
            self.send(status, {"error": {"message": words}})

        def do_GET(self):
            if self.path == "/v1/models":
                return self.send(200, {"data": [{"id": "toy"}]})
            if self.path == "/slots" and "slots" in fake.offers:
                return self.send(200, [{"id": i} for i in range(len(fake.slots))])
            return self.refuse("not here", 404)

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.path == "/tokenize" and "tokenize" in fake.offers:
                return self.send(200, {"tokens": encode(body["content"])})
            match = re.fullmatch(r"/slots/(\d+)\?action=(\w+)", self.path)
            if match and "slots" in fake.offers:
                return self.slot(int(match[1]), match[2], body.get("filename"))
            if self.path == "/v1/completions":
                return self.complete(body, body["prompt"], body.get("logprobs"), "text")
            if self.path == "/v1/chat/completions" and "chat" in fake.offers:
                prompt = "".join(f"<{message['role']}>{message['content']}" for message in body["messages"])
                return self.complete(
                    body, prompt, body.get("top_logprobs") if body.get("logprobs") else None, "chat"
                )
            return self.refuse("not here", 404)

        def slot(self, slot, action, name):
            if action == "save":
                fake.files[name] = fake.slots[slot]
            elif action == "restore":
                fake.slots[slot], fake.restored[slot] = fake.files[name], True
            else:
                fake.slots[slot] = ([], [0.0] * 4)
            self.send(200, {"id_slot": slot})

        def complete(self, body, prompt, logprobs, kind):
            for name, field in {
                "slots": "id_slot",
                "cache_prompt": "cache_prompt",
                "logprobs": "logprobs",
            }.items():
                if name not in fake.offers and field in body:
                    return self.refuse(f"{field}: no such field")
            ids = encode(prompt) if isinstance(prompt, str) else prompt
            try:
                drawn, told, cached = fake.complete(
                    ids, body["max_tokens"], slot=body.get("id_slot"), cached=body.get("cache_prompt", True),
                    logprobs=logprobs, temperature=body["temperature"], seed=body.get("seed", 0),
                )  # fmt: skip
            except RuntimeError:
                return self.refuse("it broke", 500)
            end = "length" if len(drawn) == body["max_tokens"] else "stop"
            if body.get("stream") and fake.fault == "streams less":
                drawn = drawn[:-1]
            usage = {"prompt_tokens": len(ids), "prompt_tokens_details": {"cached_tokens": cached}}
            if not body.get("stream"):
                return self.send(
                    200, {"choices": [self.choice(drawn, told, logprobs, kind, end)], "usage": usage}
                )
            self.send_response(200)
            self.end_headers()
            for i in range(len(drawn)):
                finish = end if i == len(drawn) - 1 else None
                choice = self.choice(drawn[i : i + 1], told[i : i + 1], logprobs, kind + "s", finish)
                self.wfile.write(f"data: {json.dumps({'choices': [choice]})}\n\n".encode())
            return self.wfile.write(b"data: [DONE]\n\n")

        def choice(self, drawn, told, logprobs, kind, finish):
            text = "".join(chr(32 + id) for id in drawn)
            said = None
            if logprobs is not None:
                said = {"content": []}
                for id, of in zip(drawn, told, strict=False):
                    best = sorted(range(V), key=lambda v: -of[v])[:logprobs]
                    one = {"id": id, "token": chr(32 + id), "logprob": of[id]}
                    top = [{"id": v, "token": chr(32 + v), "logprob": of[v]} for v in best]
                    said["content"].append({**one, "top_logprobs": top})
            where = {"text": {"text": text}, "texts": {"text": text}, "chat": {"message": {"content": text}},
                     "chats": {"delta": {"content": text}}}[kind]  # fmt: skip
            return {"index": 0, **where, "logprobs": said, "finish_reason": finish}

    return Handler


class serving:
    """`with serving(Fake()) as url: …`"""

    def __init__(self, fake):
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), handler(fake))

    def __enter__(self):
        threading.Thread(
            target=self.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
        ).start()
        return f"http://127.0.0.1:{self.server.server_port}"

    def __exit__(self, *_):
        self.server.shutdown()
        self.server.server_close()
