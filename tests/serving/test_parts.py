"""The parts of a server, each by itself."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from npu_compiler.errors import InputError
from npu_text.batching.engine import Chosen, LaneSampling
from npu_text.batching.texts import Event, Text, TextRequest
from npu_text.serving.answers import Answer, Answers, StopStrings
from npu_text.serving.chat import Chat
from npu_text.serving.chat_template import ChatTemplate
from npu_text.serving.completions import Completion
from npu_text.serving.core import TextJob
from npu_text.serving.events import EventPace, TextEvent, event
from npu_text.serving.protocol import ChatRequest, CompletionRequest, EmbeddingRequest, Message
from npu_text.serving.tool_calls import ToolCall, ToolCalls
from npu_text.serving.vocabulary import Vocabulary
from tests.support.serving import CHAT, END, MODEL, make_service, make_tokenizer
from tests.support.simulated_engine import is_allowed

pytest.importorskip("jinja2")


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    tokenizer = make_tokenizer()
    return Vocabulary(tokenizer.to_str(), tokenizer)


@pytest.mark.parametrize("seed", range(20))
def test_stop_strings_wherever_a_text_is_cut(seed: int) -> None:
    random = Random(seed)
    text = "".join(random.choices("ab\n", k=30))
    stops = ["".join(random.choices("ab\n", k=random.randint(1, 5))) for _ in range(random.randint(1, 3))]
    places = [place for place in (text.find(stop) for stop in stops) if place >= 0]
    found, given, left = StopStrings(stops), "", text
    while left:
        size = random.randint(1, 4)
        piece, ended = found.push(left[:size])
        given, left = given + piece, left[size:]
        if ended:
            break
    else:
        given += found.flush()
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
    if not ends:
        assert given == text
    else:  # which of two that overlap is seen first depends on the cuts
        assert given in {text[:place] for place in places}


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
def test_calls_wherever_a_text_is_cut(size: int) -> None:
    call, none = '{"name": "f", "arguments": {"x": 1}}', '<tool_call>{"no": 1}</tool_call>'
    text = f"a <b> <tool_call>\n{call}\n</tool_call>\n{none} <tool"
    calls = ToolCalls()
    parts: list[str | ToolCall] = []
    for start in range(0, len(text), size):
        parts += calls.push(text[start : start + size])
    parts += calls.flush()
    assert [part for part in parts if isinstance(part, ToolCall)] == [ToolCall("f", '{"x": 1}')]
    said = "".join(part for part in parts if isinstance(part, str))
    assert said == f"a <b> \n{none} <tool"


@pytest.mark.parametrize("call", ['{"name": "\\ud800"}', '{"name": "f", "arguments": ["\\udfff"]}'])
def test_a_call_that_no_answer_can_hold_is_text(call: str) -> None:
    calls, text = ToolCalls(), f"<tool_call>{call}</tool_call>"
    assert "".join(map(str, [*calls.push(text), *calls.flush()])) == text


def test_a_call_that_never_ends_is_text_or_a_call() -> None:
    calls = ToolCalls()
    assert list(calls.push('<tool_call>{"name": "f"}')) == []
    assert list(calls.flush()) == [ToolCall("f", "{}")]
    assert list(calls.push("<tool_call>{")) == []
    assert list(calls.flush()) == ["<tool_call>{"]


def test_pieces_of_an_answer(vocabulary: Vocabulary) -> None:
    """Stop strings, the token that ends a text, characters of several tokens, and where each token begins."""
    text = Text(TextRequest((1,), 50, LaneSampling()), [1], 0.0, 0)
    answer = Answer(text, vocabulary, ["STOP"], places=True)
    for token in vocabulary.encode("é-ST", special=False):
        answer.push(Event(text, (Chosen(token),)))
    piece = answer.read()
    assert piece is not None
    assert (piece.text, piece.finish) == ("é-", "")
    assert [at for _, at in piece.tokens] == [0, 0, 1, 2, 3]
    answer.push(Event(text, tuple(Chosen(token) for token in vocabulary.encode("OPen", special=False))))
    last = answer.read()
    assert last is not None
    assert (last.text, last.finish) == ("", "stop")
    other = Answer(text, vocabulary, ["STOP"], places=False)
    other.push(Event(text, (*map(Chosen, vocabulary.encode("ST", special=False)), Chosen(END)), "stop"))
    whole = other.read()
    assert whole is not None
    assert (whole.text, whole.finish, other.tokens) == ("ST", "stop", 3)


@pytest.mark.parametrize("text", ["plain", '"\\\n\0', "\0text\0", "한글 é \u2028", ""], ids=repr)
def test_events_of_a_text_are_those_of_the_whole(text: str) -> None:
    def content(text: str) -> dict[str, Any]:
        return {"model": '\0text\0"', "choices": [{"index": 0, "text": text, "finish_reason": None}]}

    assert TextEvent(content).of(text) == event(content(text))
    assert json.loads(event(content(text)).removeprefix("data: ")) == content(text)


async def _quiet(answer: Answer) -> list[Any]:
    """What comes of an answer of which nothing is heard for a while."""
    answers, given = Answers([answer]), []
    async for entry in answers.pieces(0.02):
        given.append(entry and entry[1].text)
        if len(given) == 2:
            for number, token in enumerate((70, 71)):
                if answer.push(Event(answer.text, (Chosen(token),), "length" if number else "")):
                    answers.wake(0)
    return given


def test_silence_is_told_and_tokens_that_come_together_are_one_piece(vocabulary: Vocabulary) -> None:
    text = Text(TextRequest((1,), 50, LaneSampling()), [1], 0.0, 0)
    given = asyncio.run(_quiet(Answer(text, vocabulary, [], places=False)))
    assert given == [None, None, vocabulary.decode([70, 71])]


def test_bytes_of_tokens(vocabulary: Vocabulary) -> None:
    for text in ("é", "a b\n", "한"):
        tokens = vocabulary.encode(text, special=False)
        assert b"".join(vocabulary.bytes_of(token) for token in tokens) == text.encode()
    assert vocabulary.bytes_of(END) == b"<|im_end|>"
    assert vocabulary.bytes_of(319) == b""


def test_bytes_of_tokens_that_sentencepiece_made() -> None:
    tokenizers = pytest.importorskip("tokenizers")
    decoders = tokenizers.decoders
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE({"<0xE2>": 0, "▁hi": 1, "x": 2}, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    vocabulary = Vocabulary(tokenizer.to_str(), tokenizer)
    assert [vocabulary.bytes_of(token) for token in range(3)] == [b"\xe2", b" hi", b"x"]


def test_templates_of_a_folder(tmp_path: Path) -> None:
    assert ChatTemplate.load(tmp_path) is None
    config: Any = {"chat_template": "{{ bos_token }}{{ messages[0].content }}", "bos_token": {"content": "<s>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    template = ChatTemplate.load(tmp_path)
    assert template is not None
    assert template.render([{"content": "a < b"}], None) == "<s>a < b"
    (tmp_path / "chat_template.jinja").write_text("{{ tools | tojson }}{{ enable_thinking }}")
    template = ChatTemplate.load(tmp_path)
    assert template is not None
    assert template.render([], [{"n": "é<"}], {"enable_thinking": False}) == '[{"n": "é<"}]False'
    assert template.render([], None, {"self": 1, "messages": 2}) == "null"  # names that functions of Python have
    loops = "".join(f"{{% for a{n} in b %}}" for n in range(30)), "{% endfor %}" * 30
    for text in ("{% if %}", "".join(loops), "{{ " + "(" * 5000 + ")" * 5000 + " }}"):
        (tmp_path / "chat_template.jinja").write_text(text)
        with pytest.raises(InputError, match="damaged"):
            ChatTemplate.load(tmp_path)
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(InputError, match="cannot be read as text"):
        ChatTemplate.load(tmp_path)
    for content, message in (("[]", "holds a list"), ("[" * 10_000, "is not JSON")):
        (tmp_path / "tokenizer_config.json").write_text(content)
        with pytest.raises(InputError, match=message):
            ChatTemplate.load(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": [1, {"name": "default"}]}')
    assert ChatTemplate.load(tmp_path) is None


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception('no system here') }}",
        "{{ messages[0].content + 1 }}",
        "{% for i in range(10000000) %}{% endfor %}",
        "{{ 1 // 0 }}",
        "{% include 'secrets' %}",
    ],
)
def test_templates_see_nothing_of_the_process(source: str) -> None:
    with pytest.raises(InputError, match="chat template"):
        ChatTemplate(source, {}).render([{"role": "user", "content": "x"}], None)


def test_the_template_of_the_tests_writes_calls_as_objects() -> None:
    call = {"function": {"name": "f", "arguments": {"x": 1}}}
    text = ChatTemplate(CHAT, {}).render([{"role": "assistant", "content": "", "tool_calls": [call]}], None)
    assert '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>' in text


def test_masks_follow_a_schema(vocabulary: Vocabulary) -> None:
    pytest.importorskip("llguidance")
    from npu_text.serving.grammars import Grammars, json_grammar

    grammars = Grammars(vocabulary, 320, [END])
    grammar = grammars.make(json_grammar({"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}))
    other = grammars.make(json_grammar(None))
    for letter in '{"a"':
        (token,) = vocabulary.encode(letter, special=False)
        masks = np.zeros((3, 10), np.uint32)
        grammar.write_masks([(grammar, 1)], masks)
        assert is_allowed(masks[1], token)
        assert not is_allowed(masks[1], END)
        assert not masks[[0, 2]].any()
        both = np.zeros_like(masks)
        grammar.write_masks([(grammar, 1), (other, 2)], both)
        assert (both[1] == masks[1]).all()
        assert is_allowed(both[2], *vocabulary.encode("{", special=False))
        grammar.take(token)
    with pytest.raises(InputError, match="nothing can be written"):
        grammars.make(json_grammar({"type": "nothing"}))


def test_long_texts_become_the_tokens_of_short_ones(vocabulary: Vocabulary) -> None:
    """They go another way, on which other threads run meanwhile."""
    part = "한글 and <|im_start|> words "
    assert vocabulary.encode(part * 1000, special=False) == vocabulary.encode(part, special=False) * 1000


def test_what_a_server_starts_with_is_looked_through_no_more() -> None:
    program = "import gc; from npu_text.serving.server import prefer_texts; prefer_texts(); "
    program += "print(gc.get_freeze_count() > 1000 > len(gc.get_objects()))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True"


def test_streams_are_told_in_turn_where_there_is_no_time_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first token and the end at once, and nobody twice while another waits."""
    clock, service = [1.0], make_service()
    monkeypatch.setattr("npu_text.serving.core.time.perf_counter", lambda: clock[0])
    monkeypatch.setattr(service.core, "_pace", EventPace(1.0))
    jobs = [TextJob(TextRequest((number,), 50)) for number in range(6)]
    told: list[int] = []

    async def steps() -> list[list[int]]:
        found = []
        async with service.core.answering(jobs) as answers:
            monkeypatch.setattr(answers, "wake", told.append)
            texts = [answer.text for answer in answers.all]
            for finish in ("", "", "", "", "length"):
                told.clear()
                service.core._dispatch([Event(text, (Chosen(65),), finish * (text is texts[4])) for text in texts])
                found.append(told.copy())
                for answer in answers.all:
                    answer.read()
                clock[0] += 2.0
        return found

    assert asyncio.run(steps()) == [[0, 1, 2, 3, 4, 5], [0, 1, 2], [3, 4], [5, 0], [4, 1, 2]]


@pytest.mark.parametrize("kind", ["completion", "chat"])
def test_the_end_of_a_stream_is_one_part(kind: str) -> None:
    """Each part is written to the client by itself; nothing comes between the last text, the usage and the end."""
    service = make_service(temperature=0)
    fields: dict[str, Any] = {"model": MODEL, "max_tokens": 5, "stream": True, "ignore_eos": True}
    fields |= {"stream_options": {"include_usage": True}, "n": 2}
    if kind == "chat":
        asked: Any = Chat(service, ChatRequest(messages=[Message(role="user", content="a")], **fields))
    else:
        asked = Completion(service, CompletionRequest(prompt="a", **fields))

    async def parts() -> list[str]:
        service.core.start()
        found = [part async for part in asked.stream()]
        await service.core.stop()
        return found

    *_, last = asyncio.run(parts())
    first, *rest = last.removesuffix("\n\n").split("\n\n")
    assert '"finish_reason":"length"' in last
    assert '"choices":[{' in first
    assert '"completion_tokens":10' in rest[-2]
    assert rest[-1] == "data: [DONE]"


@pytest.mark.parametrize(
    ("kind", "field"),
    [
        (CompletionRequest, {"prompt": [-1] * 50_000}),
        (CompletionRequest, {"prompt": "a", "stop": [1] * 50_000}),
        (ChatRequest, {"messages": [1] * 50_000}),
        (ChatRequest, {"messages": [{"role": "user", "content": [1] * 50_000}]}),
        (ChatRequest, {"messages": [{"role": "assistant", "tool_calls": [1] * 50_000}]}),
        (EmbeddingRequest, {"input": [[-1] * 50_000]}),
    ],
    ids=["tokens", "stop", "messages", "content", "calls", "input"],
)
def test_of_a_list_that_is_wrong_everywhere_one_item_is_told(kind: Any, field: dict[str, Any]) -> None:
    """A body of the largest size had kept the server from everybody else for seconds, and took a gigabyte."""
    from pydantic import ValidationError

    with pytest.raises(ValidationError) as told:
        kind.model_validate({"model": MODEL} | field)
    assert told.value.error_count() <= 5
