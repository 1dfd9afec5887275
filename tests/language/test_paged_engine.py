"""A batch over pages: each text as it would be alone, whatever else runs, and whoever shares its pages."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from npu_compiler.artifact.batch_spec import BatchSpec
from npu_compiler.artifact.generation_spec import FILE_NAME, GenerationSpec
from npu_compiler.compiled_program import CompiledProgram
from npu_compiler.errors import ExtractionError, InputError, IRError, NPUError
from npu_compiler.frontend.decoder_request import BatchRequest, check_request
from npu_compiler.integers import ceil_div
from npu_runtime import Device
from npu_runtime.backend import Recording
from npu_text.batching.engine import Chosen, LaneSampling, LaneSteps, MaskSource, Prefill, Stepped
from npu_text.batching.paged_engine import PagedEngine
from npu_text.step_check import check_batch
from tests.support.decoders import VOCABULARY, Decoder, check_greedy, config, dtype_errors, greedy, make_decoder
from tests.support.lane_choice import allowed_bits

REQUEST = BatchRequest((1, 4), 32, pages=14, chunks=(16, 64), guess=4, packs={64: (3,)})


@pytest.fixture(scope="module", params=["software-metal", "cuda"])
def device(request: pytest.FixtureRequest) -> Device:
    try:
        return Device(request.param)
    except NPUError as error:
        pytest.skip(f"no such device: {error}")


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    """A Qwen2.5 whose texts have 128 tokens: four pages."""
    return make_decoder(tmp_path_factory.mktemp("paged"), "Qwen2", batch=REQUEST)


@pytest.fixture(scope="module")
def engine(decoder: Decoder, device: Device) -> PagedEngine:
    return PagedEngine(decoder.folder, device)


class Text:
    """A text in a lane, with pages of its own."""

    def __init__(
        self,
        engine: PagedEngine,
        lane: int,
        prompt: Sequence[int],
        pages: Sequence[int],
        sampling: LaneSampling | None = None,
    ) -> None:
        self.engine, self.lane, self.prompt, self.pages = engine, lane, list(prompt), list(pages)
        self.tokens: list[int] = []
        engine.begin(lane, sampling or LaneSampling(), self.prompt)

    def parts(self, start: int = 0) -> list[Prefill]:
        """The prompt from a token on, but for its last one."""
        longest, ahead = self.engine.chunks[-1], self.prompt[:-1]
        tokens = {at: ahead[at : at + longest] for at in range(start, len(ahead), longest)}
        pages = {at: self.pages[: ceil_div(at + len(part), self.engine.page_tokens)] for at, part in tokens.items()}
        return [Prefill(self.lane, part, at, pages[at]) for at, part in tokens.items()]

    def fill(self, start: int = 0) -> Text:
        """Puts the prompt from a token on into the pages, and chooses the first token."""
        for part in self.parts(start):
            self.engine.prefill(part)()
        return self.begin()

    def begin(self, masks: Sequence[tuple[MaskSource, int]] = ()) -> Text:
        """Chooses the first token, where all but the last of the prompt are in the pages."""
        at = len(self.prompt) - 1
        pages = self.pages[: at // self.engine.page_tokens + 1]
        step = one_step(self.lane, self.prompt[at:], at, pages)._replace(masks=masks)
        self.tokens = self.engine.step(step)().tokens.tolist()
        return self


def steps_of(
    texts: Sequence[Text], guesses: Sequence[Sequence[int]] = (), masks: Sequence[tuple[MaskSource, int]] = ()
) -> LaneSteps:
    """The next step of texts."""
    lanes = np.array([text.lane for text in texts])
    positions = [len(text.prompt) + len(text.tokens) - 1 for text in texts]
    own = [position // text.engine.page_tokens + 1 for text, position in zip(texts, positions, strict=True)]
    pages = [tuple(text.pages if guesses else text.pages[:n]) for text, n in zip(texts, own, strict=True)]
    return LaneSteps(lanes, np.array([text.tokens[-1] for text in texts]), np.array(positions), pages, guesses, masks)


def go_on(texts: Sequence[Text], count: int, masks: Sequence[tuple[MaskSource, int]] = ()) -> None:
    """So many steps of all texts at once."""
    for _ in range(count):
        chosen = texts[0].engine.step(steps_of(texts, masks=masks))().tokens
        for text, token in zip(texts, chosen.tolist(), strict=True):
            text.tokens.append(token)


def last_of(engine: PagedEngine, lanes: Sequence[tuple[int, int, Sequence[int]]]) -> list[int]:
    """The tokens of the last of some texts, each in a lane, of a length, in pages, after ten steps of all."""
    texts = [Text(engine, lane, prompt(length, length), pages).fill() for lane, length, pages in lanes]
    go_on(texts, 10)
    return texts[-1].tokens


def one_step(lane: int, tokens: Sequence[int], position: int, pages: Sequence[int]) -> LaneSteps:
    guesses = [tokens[1:]] if len(tokens) > 1 else []
    return LaneSteps(np.array([lane]), np.array(tokens[:1]), np.array([position]), [tuple(pages)], guesses)


def prompt(length: int, seed: int = 0) -> list[int]:
    tokens: list[int] = np.random.default_rng(seed).integers(0, VOCABULARY, length).tolist()
    return tokens


def test_texts_of_different_lengths_are_pytorchs(engine: PagedEngine, decoder: Decoder) -> None:
    texts = [
        Text(engine, lane, prompt(length, lane), pages).fill()
        for lane, (length, pages) in enumerate([(3, [5]), (40, [0, 7]), (100, [9, 13, 2, 4])])
    ]
    go_on(texts, 12)
    for text in texts:
        check_greedy(decoder, text.prompt, text.tokens)


def test_a_text_is_the_same_in_any_company(engine: PagedEngine) -> None:
    alone = last_of(engine, [(0, 3, [1]), (1, 50, [2, 3])])
    assert last_of(engine, [(3, 90, [4, 5, 6, 7]), (0, 20, [8]), (2, 50, [13, 0])]) == alone
    assert last_of(engine, [(3, 7, [4]), (1, 50, [9, 10])]) == alone


def test_prompts_that_are_filled_in_together_are_as_alone(engine: PagedEngine, decoder: Decoder) -> None:
    """Of different lengths and at different places, fewer than the function has room for; one reads another's page."""

    def texts() -> list[Text]:
        lengths = [(40, [5, 1]), (60, [5, 7, 2]), (54, [9, 13])]
        return [Text(engine, lane, prompt(length, 3), pages) for lane, (length, pages) in enumerate(lengths)]

    alone = texts()
    for text in alone:
        text.fill(start=32 if text.lane == 1 else 0)
    go_on(alone, 8)
    for count in (3, 2):
        together = texts()[:count]
        engine.prefill(*(text.parts(32 if text.lane == 1 else 0)[0] for text in together))()
        for text in together:
            text.begin()
        go_on(together, 8)
        if engine.device.target != "cuda":  # which promises that from 512 tokens on
            assert [text.tokens for text in together] == [text.tokens for text in alone[:count]]
        for text in together:
            check_greedy(decoder, text.prompt, text.tokens)


def test_lanes_that_have_been_busy_are_left_alone(engine: PagedEngine, decoder: Decoder) -> None:
    texts = [Text(engine, lane, prompt(20, lane), [lane]).fill() for lane in range(4)]
    go_on(texts, 3)
    go_on(texts[:1], 2)  # by the function for one lane
    go_on(texts[:2], 2)
    go_on(texts, 2)
    for text in texts:
        check_greedy(decoder, text.prompt, text.tokens)


def test_steps_go_on_from_choices_that_nobody_has_seen(engine: PagedEngine, decoder: Decoder) -> None:
    """Each step is asked for before the one ahead of it is waited for; texts leave and join, in other functions."""
    texts = [Text(engine, lane, prompt(20, lane), [lane], LaneSampling()).fill() for lane in range(4)]
    company = [[0, 1, 2], [2, 0], [0], [0, 3], [0, 3, 1], [1]]
    asked: list[tuple[list[int], Callable[[], Stepped]]] = []
    counts = [0] * 4
    for lanes in company:
        known = steps_of([texts[lane] for lane in lanes])
        before = asked[-1][0] if asked else []
        sources = np.array([before.index(lane) if lane in before else -1 for lane in lanes])
        positions = known.positions + np.array([counts[lane] - len(texts[lane].tokens) + 1 for lane in lanes])
        tokens = np.where(sources < 0, known.tokens, VOCABULARY - 1)
        asked.append((lanes, engine.step(known._replace(tokens=tokens, positions=positions, sources=sources))))
        for lane in lanes:
            counts[lane] += 1
        for lanes_before, wait in asked[-2:-1]:
            for lane, token in zip(lanes_before, wait().tokens.tolist(), strict=True):
                texts[lane].tokens.append(token)
    for lane, token in zip(company[-1], asked[-1][1]().tokens.tolist(), strict=True):
        texts[lane].tokens.append(token)
    assert [len(text.tokens) - 1 for text in texts] == counts == [5, 3, 2, 2]
    for text in texts:
        check_greedy(decoder, text.prompt, text.tokens)


def test_a_choice_that_nobody_waits_for_in_time_is_kept(engine: PagedEngine) -> None:
    """Choices of every second step lie in the same memory."""
    text = Text(engine, 0, prompt(20, 5), [3]).fill()
    go_on([text], 4)
    first, wanted = text.tokens[0], text.tokens[1:]
    text = Text(engine, 1, prompt(20, 5), [4]).fill()
    steps = one_step(1, [first], 20, [4])
    waits = [engine.step(steps)]
    for at in range(21, 24):
        waits.append(engine.step(steps._replace(positions=np.array([at]), sources=np.array([0]))))
    assert [int(wait().tokens[0]) for wait in waits] == wanted


def test_pages_are_shared_and_copied_before_they_part(engine: PagedEngine, decoder: Decoder) -> None:
    common = prompt(40, 1)
    first = Text(engine, 0, common + prompt(5, 2), [3, 4]).fill()
    second = Text(engine, 1, common + prompt(9, 3), [3, 11])  # the first page as it is, 8 tokens of the second
    engine.copy_page(4, 11)
    second.fill(start=40)
    go_on([first, second], 8)
    for text in (first, second):
        check_greedy(decoder, text.prompt, text.tokens)


def test_calls_are_queued(engine: PagedEngine) -> None:
    texts = [Text(engine, lane, prompt(10, lane), [lane]).fill() for lane in range(2)]
    waits = [engine.step(steps_of([text])) for text in (*texts, *texts, *texts)]  # more than are kept on their way
    given = [int(wait().tokens[0]) for wait in waits]
    assert given == given[:2] * 3
    assert [int(wait().tokens[0]) for wait in waits] == given  # asked again


@pytest.mark.parametrize("page", [15, -16, 1 << 30], ids=str)
def test_a_page_that_there_is_none_of(page: int, engine: PagedEngine, decoder: Decoder) -> None:
    text = Text(engine, 0, prompt(40), [1, 2]).fill()
    with pytest.raises(InputError, match="expected -15 to 14"):
        engine.step(one_step(1, [1], 40, [page, 3]))()
    go_on([text], 3)
    check_greedy(decoder, text.prompt, text.tokens)


def test_scores_of_a_prompt_are_pytorchs(engine: PagedEngine, decoder: Decoder) -> None:
    """By parts that are no multiple of the lanes; and a text beside is left alone."""
    other = Text(engine, 3, prompt(20, 1), [0]).fill()
    tokens, pages = prompt(75, 4), [9, 2, 5]
    scores: list[Chosen] = []
    engine.begin(1, LaneSampling(best=2), tokens)
    for start, end in ((0, 1), (1, 34), (34, 75)):
        ends = end == len(tokens)
        part = Prefill(1, tokens[start:end], start, pages[: ceil_div(end, 32)], scored=3)
        scores += engine.prefill(replace(part, following=None if ends else tokens[end]))()
    logits = decoder.logits(tokens)
    expected, error = torch.log_softmax(logits.double(), -1), 2 * dtype_errors(decoder, tokens).double() + 1e-5
    assert [score.token for score in scores] == tokens[1:]
    for place, score in enumerate(scores):
        assert score.logprob is not None
        assert abs(score.logprob - float(expected[place, score.token])) <= 2 * error[place]
        best = expected[place].topk(3).values.tolist()
        np.testing.assert_allclose([logprob for _, logprob in score.best], best, atol=float(2 * error[place]))
        for token, logprob in score.best:
            assert abs(logprob - float(expected[place, token])) <= 2 * error[place]
    go_on([other], 3)
    check_greedy(decoder, other.prompt, other.tokens)


def test_what_the_engine_does_not_do_is_refused(engine: PagedEngine) -> None:
    with pytest.raises(InputError, match="expected 1 to 4"):
        engine.step(LaneSteps(np.arange(5), np.ones(5, np.int64), np.zeros(5, np.int64), [(0,)] * 5))
    with pytest.raises(InputError, match="up to 5 tokens"):
        engine.step(one_step(0, [1, 2, 3, 4, 5], 0, [0]))
    with pytest.raises(InputError, match="65 tokens"):
        engine.prefill(Prefill(0, [1] * 65, 0, [0, 1, 2]))
    with pytest.raises(InputError, match="tokens of 0 prompts"):
        engine.prefill()
    scored = (Prefill(lane, [1] * 17, 0, [lane], scored=1 if lane else None) for lane in range(2))
    with pytest.raises(InputError, match="score each by itself"):
        engine.prefill(*scored)
    with pytest.raises(InputError, match="best=21"):
        engine.check(LaneSampling(), 21, False)
    with pytest.raises(InputError, match="temperature"):
        engine.begin(0, LaneSampling(temperature=-1.0), [])


def test_guesses_change_no_text(engine: PagedEngine) -> None:
    def fresh() -> list[Text]:
        drawn = LaneSampling(temperature=0.8, top_k=20, seed=3)
        penalised = LaneSampling(frequency_penalty=0.5)
        return [
            Text(engine, lane, prompt(30, lane), pages, sampling).fill()
            for lane, pages, sampling in ((0, [0, 1], LaneSampling()), (2, [2, 3], drawn), (3, [4, 5], penalised))
        ]

    alone = fresh()
    go_on(alone, 9)
    texts = fresh()
    rights = [3, 1, 0]  # of each guess, as often as it lasts
    while any(len(text.tokens) < 10 for text in texts):
        guesses = []
        for text, expected, right in zip(texts, alone, rights, strict=True):
            rest = expected.tokens[len(text.tokens) :]
            wrong = [(token + 1) % VOCABULARY for token in rest[right : right + 1]] if right == 1 else []
            guesses.append([*rest[:right], *wrong])
        found = engine.step(steps_of(texts, guesses))()
        for place, text in enumerate(texts):
            text.tokens += [choice.token for choice in found.chosen(place)]
    for text, expected in zip(texts, alone, strict=True):
        assert text.tokens[:10] == expected.tokens


class Allowed:
    """A mask that stays the same; it counts how often it was asked for."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens, self.asked = list(tokens), 0

    def write_masks(self, places: Sequence[tuple[Allowed, int]], masks: NDArray[np.uint32]) -> None:
        for source, row in places:
            source.asked += 1
            masks[row] = allowed_bits(np.isin(np.arange(VOCABULARY), source.tokens))


def test_masks_of_some_texts(engine: PagedEngine, decoder: Decoder) -> None:
    """They hold for their own text alone, for the token behind a prompt, and where others guess."""
    few, others = Allowed([3, 77, 200]), Allowed(range(0, VOCABULARY, 2))
    plain = [Text(engine, lane, prompt(20, lane), [2 * lane, 2 * lane + 1]).fill() for lane in (1, 2, 3)]
    masked = Text(engine, 0, prompt(20, 0), [0, 6])
    engine.prefill(*masked.parts())()
    masked.begin([(few, 0)])
    go_on([plain[0], masked, plain[1], plain[2]], 5, [(few, 1), (others, 3)])
    for text in plain[:2]:
        check_greedy(decoder, text.prompt, text.tokens)
    logits = decoder.logits([*masked.prompt, *masked.tokens])
    chosen = logits[len(masked.prompt) - 1 : -1][:, few.tokens]
    taken = [few.tokens.index(token) for token in masked.tokens]
    assert (chosen.max(1).values - chosen[range(6), taken]).max() < 0.05  # equals, but for a near tie
    assert not any(token % 2 for token in plain[2].tokens[1:])
    assert (few.asked, others.asked) == (6, 5)
    guesses = [greedy(decoder, [*plain[0].prompt, *plain[0].tokens], 2), [], []]
    found = engine.step(steps_of([plain[0], masked, plain[1]], guesses, [(few, 1)]))()
    assert found.chosen(1)[0].token in few.tokens
    plain[0].tokens += [choice.token for choice in found.chosen(0)]
    check_greedy(decoder, plain[0].prompt, plain[0].tokens)


def test_masks_are_made_while_the_layers_run(decoder: Decoder, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """What has no masks is one launch; with masks the choice is another, behind them."""
    happened: list[str] = []

    class Recorded(Recording):
        def launch(self) -> Any:
            happened.append(f"{len(self._bound)} plans")
            return super().launch()

    class Mask(Allowed):
        def write_masks(self, places: Any, masks: NDArray[np.uint32]) -> None:
            happened.append("masks")
            super().write_masks(places, masks)

    monkeypatch.setattr(device.backend, "record", Recorded)
    engine = PagedEngine(decoder.folder, device)
    text = Text(engine, 0, prompt(5), [0]).fill()
    happened.clear()
    go_on([text], 1)
    go_on([text], 1, [(Mask([1]), 0)])
    assert happened == ["3 plans", "2 plans", "masks", "1 plans"]


def test_learned_positions(tmp_path: Path, device: Device) -> None:
    decoder = make_decoder(tmp_path, "GPT2", batch=BatchRequest((2,), 64, chunks=(16,)))
    engine = PagedEngine(decoder.folder, device)
    text = Text(engine, 1, prompt(9), [2]).fill()
    go_on([text], 4)
    assert text.tokens == greedy(decoder, text.prompt, 5)


def test_what_the_folder_says(decoder: Decoder, tmp_path: Path) -> None:
    spec = GenerationSpec.load(decoder.folder)
    assert spec.batch is not None
    assert spec.batch.decode == {1: "decode_1", 4: "decode_4"}
    assert spec.batch.chunks == {16: {1: "chunk_16"}, 64: {1: "chunk_64", 3: "chunk_64x3"}}
    assert (spec.batch.pages, spec.batch.page_tokens, spec.batch.context) == (14, 32, 128)
    assert spec.batch.pool_shapes == ((15, 2, 32, 16),) * 4
    content = json.loads((decoder.folder / FILE_NAME).read_text())
    del content["batch"]  # as an earlier release wrote it
    (tmp_path / FILE_NAME).write_text(json.dumps(content))
    assert GenerationSpec.load(tmp_path) == replace(spec, batch=None)
    with pytest.raises(InputError, match="--lanes"):
        PagedEngine(tmp_path, Device("software-metal"))


@pytest.mark.parametrize(
    "change", [{"pages": 13}, {"context": 100}, {"page_tokens": 16}, {"functions": {}}, {"pool_shapes": []}], ids=str
)
def test_a_folder_that_contradicts_itself(change: dict[str, Any], decoder: Decoder, tmp_path: Path) -> None:
    content = json.loads((decoder.folder / FILE_NAME).read_text())
    content["batch"] |= change
    (tmp_path / FILE_NAME).write_text(json.dumps(content))
    with pytest.raises(IRError, match="extract the model again"):
        GenerationSpec.load(tmp_path)


def test_a_folder_that_its_functions_contradict(decoder: Decoder, engine: PagedEngine, device: Device) -> None:
    """The host would fill tables with pages that the pools have not."""
    spec = GenerationSpec.load(decoder.folder)
    functions = CompiledProgram.load(decoder.folder / f"batch.{device.target}.npubin").functions
    batch = spec.batch
    assert batch is not None
    check_batch(batch, spec.vocabulary, functions)
    shapes = tuple((101, *shape[1:]) for shape in batch.pool_shapes)
    others = [replace(batch, pages=100, pool_shapes=shapes), replace(batch, context=2 * batch.context)]
    others += [replace(batch, functions={"other": batch.functions["decode_1"]})]
    others += [replace(batch, functions={"decode_1": replace(batch.functions["decode_1"], tables="positions")})]
    for other, size in [*((other, spec.vocabulary) for other in others), (batch, 7)]:
        with pytest.raises(IRError, match="extract the model again"):
            check_batch(other, size, functions)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (BatchRequest(()), "lanes"),
        (BatchRequest((0,)), "lanes"),
        (BatchRequest((2,), 40), "a multiple of 32"),
        (BatchRequest((2,), 512), "pages of 512 tokens"),
        (BatchRequest((2,), 32, pages=3), "3 pages"),
        (BatchRequest((2,), 32, chunks=(1,)), "chunks"),
    ],
    ids=lambda given: given if isinstance(given, str) else "",
)
def test_requests_that_make_no_sense(request_: BatchRequest, message: str, tmp_path: Path) -> None:
    config("Qwen2").save_pretrained(tmp_path / "source")
    with pytest.raises(ExtractionError, match=message):
        check_request(tmp_path / "source", tmp_path / "model", 256, batch=request_)


def test_the_spec_knows_its_functions_by_size() -> None:
    assert BatchSpec(32, 4, 64, (), {}).contradiction() == "no function that takes one token of each lane"
