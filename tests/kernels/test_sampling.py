"""The sampler draws by the law it states, kernel and reference draw the same tokens, and no row sees another."""

import math
from dataclasses import dataclass, fields

import numpy as np
import pytest
import torch

from weft_kernels.sampling import reference
from weft_kernels.sampling import triton_kernel as kernel

NEG_INF = float("-inf")
NUM_DRAWS = 100_000
BOTH = pytest.mark.parametrize("implementation", [kernel.sample, reference.sample], ids=["kernel", "reference"])


@dataclass
class Rows:
    """The arguments of ``sample``, in its order."""

    logits: torch.Tensor
    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    seeds: torch.Tensor
    positions: torch.Tensor

    def of(self, rows):
        """The chosen rows."""
        return Rows(*(getattr(self, field.name)[rows] for field in fields(self)))

    def drawn_by(self, implementation, device="cpu"):
        """The tokens that ``implementation`` draws, on the CPU."""
        return implementation(*(getattr(self, field.name).contiguous().to(device) for field in fields(self))).cpu()


def _rows(logits, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, position=0):
    """Rows that share their parameters, or have one of each where a list or tensor is given."""
    num_rows = len(logits)

    def column(value, dtype):
        return torch.as_tensor(value, dtype=dtype).expand(num_rows).contiguous()

    return Rows(
        logits,
        column(temperature, torch.float32),
        column(top_k, torch.int32),
        column(top_p, torch.float32),
        column(min_p, torch.float32),
        column(seed, torch.int64),
        column(position, torch.int32),
    )


def _mixed_rows(num_rows, vocab_size, seed=0):
    """Rows that differ in every parameter, extreme ones among them; some tokens are forbidden and some logits tie."""
    generator = torch.Generator().manual_seed(seed)

    def pick(values):
        return torch.tensor(values)[torch.randint(len(values), (num_rows,), generator=generator)]

    logits = torch.randn(num_rows, vocab_size, generator=generator) * 3
    logits[torch.rand(num_rows, vocab_size, generator=generator) < 0.1] = NEG_INF
    logits[::2] = logits[::2].round()
    return _rows(
        logits,
        temperature=pick([0.0, 1.0, 0.7, 1.3, 1.0, 1e-6, 1e6]),
        top_k=pick([0, 0, 1, 2, 20, 5000]),
        top_p=pick([1.0, 0.9, 0.5, 0.01]),
        min_p=pick([0.0, 0.0, 0.1, 1.0]),
        seed=torch.randint(-(2**62), 2**62, (num_rows,), generator=generator),
        position=torch.randint(0, 2**31 - 1, (num_rows,), generator=generator),
    )


def _kept_law(logits, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """Probabilities by definition, in float64: min-p, then top-k, then top-p, each of what the one before has left."""
    scaled = [value / temperature for value in logits]
    weights = [math.exp(value - max(scaled)) for value in scaled]
    kept = [index for index, weight in enumerate(weights) if weight >= min_p]
    if top_k:
        least = sorted((weights[index] for index in kept), reverse=True)[: min(top_k, len(kept))][-1]
        kept = [index for index in kept if weights[index] >= least]
    total = sum(weights[index] for index in kept)
    kept = [index for index in kept if sum(weights[o] for o in kept if weights[o] > weights[index]) < top_p * total]
    total = sum(weights[index] for index in kept)
    return np.array([weights[index] / total if index in kept else 0.0 for index in range(len(logits))])


LAW_LOGITS = [2.0, 1.7, 1.1, 1.1, 0.6, 0.2, -0.3, -0.9, -1.4, -2.0, -3.0]


def _assert_follows_the_law(implementation, **parameters):
    """A chi-square test of 100,000 draws, over positions and over seeds; tokens filtered out are never drawn."""
    stats = pytest.importorskip("scipy.stats")
    expected = _kept_law(LAW_LOGITS, **parameters)
    logits = torch.tensor(LAW_LOGITS).expand(NUM_DRAWS, -1).contiguous()
    for keys in ({"position": torch.arange(NUM_DRAWS)}, {"seed": torch.arange(NUM_DRAWS) * 0x5DEECE66D}):
        tokens = _rows(logits, **parameters, **keys).drawn_by(implementation)
        counts = np.bincount(tokens.numpy(), minlength=len(LAW_LOGITS))
        kept = expected > 0
        assert 0 == counts[~kept].sum()
        assert stats.chisquare(counts[kept], expected[kept] * NUM_DRAWS).pvalue > 1e-3


def _assert_draws_the_same(implementation, rows, device="cpu"):
    expected, actual = rows.drawn_by(reference.sample), rows.drawn_by(implementation, device)
    assert torch.int32 == actual.dtype
    assert torch.equal(expected, actual), "a drawn token is wrong"


@pytest.mark.parametrize(
    "parameters",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 3.0},
        {"top_k": 3},  # the third and the fourth tie: both stay
        {"top_k": 5},
        {"top_p": 0.8},
        {"min_p": 0.3},
        {"temperature": 1.5, "top_k": 7, "top_p": 0.85, "min_p": 0.05},
    ],
    ids=lambda parameters: ",".join(f"{name}={value}" for name, value in parameters.items()) or "plain",
)
def test_draws_follow_the_law(parameters):
    """100,000 draws of the reference pass a chi-square test against the softmax of what the filters keep."""
    _assert_follows_the_law(reference.sample, **parameters)


@pytest.mark.parametrize(("wrong", "more"), [("positions", {}), ("top_k", {"top_k": 5})])
def test_the_law_catches_a_wrong_draw(wrong, more):
    """Noise keyed by the seed alone, which draws one token for ever, and a top-k of one too many fail the test."""

    def draw(logits, temperature, top_k, top_p, min_p, seeds, positions):
        positions, top_k = (positions * 0, top_k) if wrong == "positions" else (positions, top_k + 1)
        return reference.sample(logits, temperature, top_k, top_p, min_p, seeds, positions)

    with pytest.raises(AssertionError):
        _assert_follows_the_law(draw, **more)


@pytest.mark.parametrize(("num_rows", "vocab_size"), [(3, 5), (17, 33), (3, 1000), (1, 2049)])
def test_kernel_draws_what_the_reference_draws(place_float32, num_rows, vocab_size):
    """Tokens are equal for mixed parameters, with ties and forbidden tokens, in vocabularies of odd sizes."""
    _assert_draws_the_same(kernel.sample, _mixed_rows(num_rows, vocab_size, vocab_size), place_float32.device)


@pytest.mark.parametrize(
    ("vocab_size", "filters"),
    [
        pytest.param(128_256, {}, marks=pytest.mark.long),
        *((9001, filters) for filters in ({}, {"top_p": 0.9}, {"top_k": 40, "min_p": 0.01})),
    ],
    ids=["128k", "all", "top-p", "top-k-min-p"],
)
def test_kernel_takes_a_vocabulary_of_many_tiles(place_float32, vocab_size, filters):
    """Tokens are equal where every stage runs over several tiles."""
    logits = torch.randn(1, vocab_size, generator=torch.Generator().manual_seed(3)) * 3

    _assert_draws_the_same(kernel.sample, _rows(logits, seed=1, **filters), place_float32.device)


def check(implementation, place):
    """Rows of which some are filtered by top-k and some by top-p draw the reference's tokens."""
    generator = torch.Generator().manual_seed(5)
    rows = _rows(
        torch.randn(8, 40, generator=generator),
        temperature=2.0,
        top_k=torch.tensor([2] * 4 + [0] * 4),
        top_p=torch.tensor([1.0] * 4 + [0.5] * 4),
        seed=torch.randint(-(2**62), 2**62, (8,), generator=generator),
        position=torch.arange(8),
    )
    _assert_draws_the_same(implementation, rows, place.device)


def test_a_row_of_the_reference_does_not_depend_on_its_neighbours():
    """A needle at any place among 64 rows of other parameters draws the token that it draws alone."""
    rows = _mixed_rows(65, 513, seed=1)
    batch = rows.drawn_by(reference.sample)

    assert torch.equal(batch, torch.cat([rows.of([index]).drawn_by(reference.sample) for index in range(65)]))
    order = torch.randperm(65, generator=torch.Generator().manual_seed(2))
    assert torch.equal(batch[order], rows.of(order).drawn_by(reference.sample))


def test_a_row_of_the_kernel_does_not_depend_on_its_neighbours(place_float32):
    """The same of the kernel: a needle among 20, last and in between."""
    hay = _rows(_mixed_rows(20, 65).logits, temperature=torch.arange(20) % 3 / 2, position=torch.arange(20))
    needle = _rows(torch.randn(1, 65), temperature=1.1, top_k=9, top_p=0.9, seed=-7, position=12)
    alone = needle.drawn_by(kernel.sample, place_float32.device)

    for place in (7, 20):
        batch = Rows(
            *(
                torch.cat(
                    [getattr(hay, field.name)[:place], getattr(needle, field.name), getattr(hay, field.name)[place:]]
                )
                for field in fields(Rows)
            )
        )
        assert alone.item() == batch.drawn_by(kernel.sample, place_float32.device)[place].item()


@BOTH
def test_temperature_0_and_top_k_1_take_the_lowest_best(place_float32, implementation):
    """Both take the best logit whatever the other parameters, and the lowest id where several are best."""
    logits = torch.randn(4, 70, generator=torch.Generator().manual_seed(0))
    logits[0, [11, 30, 69]] = 9.0
    logits[1] = 0.0
    expected = torch.tensor([11, 0, int(logits[2].argmax()), int(logits[3].argmax())], dtype=torch.int32)

    for greedy in (
        _rows(logits, temperature=0.0),
        _rows(logits, temperature=0.0, top_k=5, top_p=0.3, min_p=0.2),
        _rows(logits, temperature=5.0, top_k=1, seed=3),
    ):
        assert torch.equal(expected, _on(implementation, greedy, place_float32))


@BOTH
def test_forbidden_tokens_are_never_drawn(place_float32, implementation):
    """With all tokens but one forbidden that one is drawn at any temperature; with all forbidden the id is valid."""
    logits = torch.full((6, 37), NEG_INF)
    logits[:5, 23] = torch.tensor([-1e30, 0.0, 5.0, 1e30, -3.0])
    rows = _rows(
        logits,
        temperature=[0.0, 1e-30, 1.0, 1e30, 0.5, 1.0],
        top_k=[0, 0, 3, 0, 0, 4],
        top_p=0.5,
        min_p=[0.0] * 4 + [1.0, 0.5],
    )

    assert [23, 23, 23, 23, 23, 0] == _on(implementation, rows, place_float32).tolist()


@BOTH
def test_extreme_temperatures_neither_overflow_nor_become_nan(place_float32, implementation):
    """The least float32 temperature is greedy in effect; the largest draws evenly, low ids and high ones."""
    logits = torch.tensor([[1.0, 3.0, 2.0, -4.0] * 8]).expand(24, -1).contiguous() * 1000
    logits[:, 17] = 3001.0
    cold = _rows(logits[:3], temperature=[1e-45, 1e-38, 1e-3], top_p=[1.0, 0.9, 1.0], position=torch.arange(3))
    hot = _rows(logits, temperature=3e38, position=torch.arange(24))

    assert [17, 17, 17] == _on(implementation, cold, place_float32).tolist()
    assert len(set(_on(implementation, hot, place_float32).tolist())) > 12


def test_equal_seeds_couple_rows_of_other_logits():
    """Two slightly different distributions draw the same token far more often than independent draws would."""
    generator = torch.Generator().manual_seed(0)
    target = torch.randn(2000, 200, generator=generator) * 2.5
    draft = target + torch.randn(2000, 200, generator=generator) * 0.1
    position = torch.arange(2000)
    coupled = _rows(draft, position=position).drawn_by(reference.sample)
    independent = _rows(draft, position=position, seed=1).drawn_by(reference.sample)
    drawn = _rows(target, position=position).drawn_by(reference.sample)

    assert (coupled == drawn).float().mean() > 0.9
    assert (independent == drawn).float().mean() < 0.3


PENALTIES = {"repetition": [1.0, 1.3, 0.5], "presence": [0.0, 0.7, -0.4], "frequency": [0.2, 0.0, 1.5]}
TOKENS_OF_ROW = [
    [],
    [(3, 0, 0.0), (7, 2, 0.0), (8, -1, 5.0), (0, 1, -2.0)],
    [(index, index % 4 - 1, 0.1 * index) for index in range(300)] + [(302, 2, NEG_INF)],
]


def assert_penalises(apply_penalties, device="cpu"):
    """Each listed token gets bias, repetition, frequency and presence, in this order; the others keep their logits."""
    logits = torch.randn(3, 303, generator=torch.Generator().manual_seed(0))
    expected = logits.double().tolist()
    for row, tokens in enumerate(TOKENS_OF_ROW):
        for token, count, bias in tokens:
            score = expected[row][token] + bias
            if count >= 0:
                factor = PENALTIES["repetition"][row]
                score = score / factor if score > 0 else score * factor
            if count > 0:
                score -= count * PENALTIES["frequency"][row] + PENALTIES["presence"][row]
            expected[row][token] = score
    listed = [entry for tokens in TOKENS_OF_ROW for entry in tokens]
    actual = logits.to(device)
    apply_penalties(
        actual,
        torch.tensor([0, *np.cumsum([len(tokens) for tokens in TOKENS_OF_ROW])], dtype=torch.int32, device=device),
        *(
            torch.tensor([entry[column] for entry in listed], dtype=dtype, device=device)
            for column, dtype in enumerate((torch.int32, torch.int32, torch.float32))
        ),
        *(torch.tensor(values, device=device) for values in PENALTIES.values()),
    )
    wide = torch.tensor(expected, dtype=torch.float64)
    assert torch.allclose(wide, actual.double().cpu(), rtol=1e-6, atol=1e-6), "a penalty is wrong"
    assert torch.equal(logits[0], actual[0].cpu())
    return actual.cpu()


def test_penalties_agree_with_a_plain_loop(place_float32):
    """Ragged rows, an empty one among them, agree with the definition; the kernel rounds as the reference does."""
    expected = assert_penalises(reference.apply_penalties)
    actual = assert_penalises(kernel.apply_penalties, place_float32.device)

    assert place_float32.device != "cpu" or torch.equal(expected, actual)


def assert_masks(apply_masks, device="cpu"):
    """In the chosen rows the tokens whose bit is 0 become minus infinity, up to an odd last word; nothing else does."""
    random = np.random.default_rng(4)
    for vocab_size in (33, 1024, 2051):
        logits = torch.randn(4, vocab_size, generator=torch.Generator().manual_seed(0))
        rows, is_allowed = [3, 1], random.random((2, -(-vocab_size // 32) * 32)) < 0.5
        words = torch.from_numpy(np.packbits(is_allowed, axis=1, bitorder="little").view(np.int32))
        expected = logits.clone()
        expected[rows] = expected[rows].where(torch.from_numpy(is_allowed[:, :vocab_size]), torch.tensor(NEG_INF))
        actual = logits.to(device)
        apply_masks(actual, torch.tensor(rows, dtype=torch.int32, device=device), words.to(device))
        assert torch.equal(expected, actual.cpu()), f"a mask of {vocab_size} tokens is wrong"


def test_masks_forbid_tokens(place_float32):
    """Of the rows that they are for, alike in kernel and reference."""
    assert_masks(reference.apply_masks)
    assert_masks(kernel.apply_masks, place_float32.device)


def test_no_rows_are_no_work(place_float32):
    """A step that samples nothing gives an empty result rather than an empty launch."""
    assert 0 == _on(kernel.sample, _rows(torch.zeros(0, 8)), place_float32).numel()


def _on(implementation, rows, place):
    """The reference runs on the CPU wherever the kernel runs."""
    return rows.drawn_by(implementation, "cpu" if implementation is reference.sample else place.device)
