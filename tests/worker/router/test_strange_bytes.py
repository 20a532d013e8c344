"""Bytes that are no text, wherever a client may put them: an answer in JSON that can be read, never a 500."""

import json
from itertools import product

from raw_client import RawClient
from replay_fixtures import Pod

STRANGE = [b"\xed\xa0\x80", b"\xff\xfe", b"%ED%A0%80", b"%FF", b"\\ud800", "\u202e\u20ac".encode(), b"%00", b"%0d%0a"]
BODY = b'{"model": "tiny", "prompt": "a", "max_tokens": 1}'


def requests(strange: bytes) -> list[bytes]:
    """Raw requests with it in the path, the query, headers, and in each place of a body that an error repeats."""
    bodies = [BODY.replace(word, word[:-1] + strange + b'"') for word in (b'"model"', b'"tiny"', b'"max_tokens"')]
    bodies += [b'{"model": "tiny", "messages": [{"role": "%s", "content": "a"}]}' % strange]
    posts = [
        b"POST /v1/%s HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Length: %d\r\n%s\r\n%s"
        % (path, len(body), head, body)
        for body, path, head in [
            *((body, b"completions", b"") for body in bodies),
            *((body, b"chat/completions", b"") for body in bodies),
            (BODY, b"completions", b"x-kimi-lane: %s\r\n" % strange),
            (BODY, b"completions", b"x-kimi-prefill: tcp://%s\r\n" % strange),
            (b"{}", b"completions?a=%s" % strange, b"x-request-id: %s\r\n" % strange),
        ]
    ]
    gets = [
        b"%s %s HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n" % (method, path + strange)
        for method, path in product((b"GET", b"DELETE"), (b"/v1/models/", b"/", b"/v2?a="))
    ]
    return posts + gets


async def test_every_answer_can_be_read_and_is_no_error_of_ours(front: str, pod: Pod) -> None:
    for sent in [each for strange in STRANGE for each in requests(strange)]:
        if front != pod.url and b"x-kimi-" in sent:
            continue  # a router sends its own
        with RawClient(front) as client:
            await client.send(sent)
            answer = await client.receive_all()
        assert 400 <= int(answer.split()[1]) < 500, (sent, answer)
        head, _, body = answer.partition(b"\r\n\r\n")
        # uvicorn says in plain text what is no HTTP
        assert json.loads(body)["error"]["message"] if b"application/json" in head else body.isascii()
