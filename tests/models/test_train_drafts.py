"""Draft modules and their loss against slow, obvious twins; exported folders against the folder check."""

import pytest

torch = pytest.importorskip("torch")
from safetensors.torch import load_file  # noqa: E402
from torch.nn import functional  # noqa: E402

from sglang_spec_ext.models.check import check_draft  # noqa: E402
from sglang_spec_ext.models.draft_restart import own_tokens, take_weights  # noqa: E402
from sglang_spec_ext.models.draft_start import Start  # noqa: E402
from sglang_spec_ext.models.drafts_block import BlockDraft, BlockShape  # noqa: E402
from sglang_spec_ext.models.drafts_eagle3 import Eagle3Draft, Eagle3Shape  # noqa: E402
from sglang_spec_ext.models.drafts_export import save_draft  # noqa: E402
from sglang_spec_ext.models.drafts_load import DraftFolderError  # noqa: E402
from sglang_spec_ext.models.features import Batch  # noqa: E402
from sglang_spec_ext.models.losses import Candidates, distill, teacher_probabilities  # noqa: E402
from sglang_spec_ext.models.target import TargetConfig, apply_rope, rope_table  # noqa: E402

TARGET = TargetConfig(
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=6,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    vocab_size=40,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
)
TAPS = (1, 4)
COMMON = torch.arange(3, 40, 2)


def assert_close(name, ref, got):
    """float32 sums in another order: 1e-4 of the largest value."""
    torch.testing.assert_close(
        got, ref, rtol=1e-4, atol=1e-4 * ref.abs().max().item(), msg=lambda text: f"{name}: {text}"
    )


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(5)


def make_batch(size=2, length=11) -> Batch:
    return Batch(
        tokens=torch.randint(4, TARGET.vocab_size, (size, length)),
        taps=torch.randn(size, length, len(TAPS) * TARGET.hidden_size) * 3,
        final=torch.randn(size, length, TARGET.hidden_size),
        prompt_len=torch.tensor([3] * size),
        lengths=torch.tensor([length] * size),
    )


def make_start() -> Start:
    return Start(
        features=torch.randn(200, len(TAPS) * TARGET.hidden_size) * 3 + 1,
        final=torch.randn(200, TARGET.hidden_size) + 1,
        final_norm=torch.rand(TARGET.hidden_size) + 0.5,
        head=torch.randn(TARGET.vocab_size, TARGET.hidden_size),
    )


def make_block(*, num_layers, first_row, rank=0) -> BlockDraft:
    shape = BlockShape(
        taps=TAPS,
        num_layers=num_layers,
        intermediate_size=24,
        num_kv_heads=2,
        block=4,
        first_row=first_row,
        mask_token_id=3,
        markov_rank=rank,
    )
    draft = BlockDraft(shape, TARGET, embedding=torch.randn(40, 32), common=COMMON)
    draft.initialise(make_start(), seed=1)
    return draft.eval()


def attend(query, key, value):
    """query [heads, d] over key and value [n, kv_heads, d], plainly."""
    group = query.shape[0] // key.shape[1]
    rows = []
    for head in range(query.shape[0]):
        scores = key[:, head // group] @ query[head] * query.shape[1] ** -0.5
        rows.append(scores.softmax(0) @ value[:, head // group])
    return torch.cat(rows)


def rotated(x, position):
    cosine, sine = rope_table(torch.tensor(position), head_dim=TARGET.head_dim, theta=TARGET.rope_theta)
    return apply_rope(x, cosine, sine)


def block_by_hand(draft: BlockDraft, batch: Batch, row: int, anchor: int):
    """All outputs [block, hidden] of one anchor, one query at a time, as the engine's cache would give."""
    context = draft.hidden_norm(draft.fc(batch.taps[row, :anchor]))
    ids = [int(batch.tokens[row, anchor])] + [draft.shape.mask_token_id] * (draft.shape.block - 1)
    x = draft.embedding[ids]
    for layer in draft.layers:
        attention, normed = layer.self_attn, layer.input_layernorm(x)
        keys, values = [], []
        for position in range(anchor + draft.shape.block):
            source = context[position] if position < anchor else normed[position - anchor]
            keys.append(
                rotated(attention.k_norm(attention.k_proj(source).view(-1, TARGET.head_dim)), position)
            )
            values.append(attention.v_proj(source).view(-1, TARGET.head_dim))
        key, value = torch.stack(keys), torch.stack(values)
        mixed = []
        for place in range(draft.shape.block):
            query = attention.q_norm(attention.q_proj(normed[place]).view(-1, TARGET.head_dim))
            mixed.append(attend(rotated(query, anchor + place), key, value))
        x = x + attention.o_proj(torch.stack(mixed))
        x = x + layer.mlp(layer.post_attention_layernorm(x))
    return draft.norm(x)


@pytest.mark.parametrize(("num_layers", "first_row"), [(1, 0), (2, 1), (3, 0)])
@torch.no_grad()
def test_block_rows_equal_whole_blocks_by_hand(num_layers, first_row):
    draft, batch = make_block(num_layers=num_layers, first_row=first_row), make_batch()
    anchors = torch.tensor([[3, 6, 7], [4, 5, 6]])
    owner = torch.tensor([[0, 0, 1, 2, 2], [2, 1, 1, 0, 0]])
    places = torch.tensor([[0, 3, 1, 2, 0], [1, 0, 3, 3, 2]])
    found = draft.hidden(batch, anchors=anchors, owner=owner, places=places)
    for row in range(2):
        blocks = [block_by_hand(draft, batch, row, int(anchor)) for anchor in anchors[row]]
        wanted = torch.stack([blocks[o][p] for o, p in zip(owner[row], places[row], strict=True)])
        assert_close(f"sequence {row}", wanted, found[row])


def make_eagle3() -> Eagle3Draft:
    shape = Eagle3Shape(taps=TAPS, intermediate_size=24, draft_vocab_size=len(COMMON))
    draft = Eagle3Draft(shape, TARGET, embedding=torch.randn(40, 32), common=COMMON)
    draft.initialise(make_start(), seed=1)
    return draft.eval()


def eagle3_by_hand(draft: Eagle3Draft, batch: Batch, row: int, start: int, steps: int):
    """Outputs [steps, hidden] of one start, with a cache that grows by one key a step."""
    layer = draft.midlayer

    def pair(state, token):
        return torch.cat([layer.input_layernorm(draft.embedding[token]), layer.hidden_norm(state)])

    state, keys, values, outputs = None, [], [], []
    for position in range(start + steps):
        if position <= start:
            state = draft.fc(batch.taps[row, position])
        joined = pair(state, batch.tokens[row, position + 1])
        keys.append(rotated(layer.self_attn.k_proj(joined).view(-1, TARGET.head_dim), position))
        values.append(layer.self_attn.v_proj(joined).view(-1, TARGET.head_dim))
        if position >= start:
            query = rotated(layer.self_attn.q_proj(joined).view(-1, TARGET.head_dim), position)
            state = state + layer.self_attn.o_proj(attend(query, torch.stack(keys), torch.stack(values)))
            state = state + layer.mlp(layer.post_attention_layernorm(state))
            outputs.append(draft.norm(state))
    return torch.stack(outputs)


@torch.no_grad()
def test_eagle3_unrolled_in_parallel_equals_a_growing_cache():
    draft, batch = make_eagle3(), make_batch()
    everything = torch.arange(batch.tokens.shape[1] - 1)[None].expand(2, -1)
    second, third = torch.tensor([[5, 2, 4], [3, 6, 2]]), torch.tensor([[2, 0], [0, 1]])
    outputs = draft.unroll(batch, [everything, second, third])
    for row in range(2):
        for place, pick in enumerate(third[row]):
            start = int(second[row, pick])
            wanted = eagle3_by_hand(draft, batch, row, start, 3)
            assert_close("step 0", wanted[0], outputs[0][row, start])
            assert_close("step 1", wanted[1], outputs[1][row, pick])
            assert_close("step 2", wanted[2], outputs[2][row, place])


@pytest.mark.parametrize("rank", [0, 3])
def test_loss_and_gradients_equal_autograd(rank):
    rows, tokens, hidden = 700, 23, 16  # more rows than one chunk
    head = torch.randn(tokens, hidden, requires_grad=True)
    x = torch.randn(rows, hidden, requires_grad=True)
    latent = torch.randn(rows, rank, requires_grad=True) if rank else None
    markov = torch.randn(tokens, rank, requires_grad=True) if rank else None
    log_count = torch.rand(tokens)
    teacher = teacher_probabilities(
        torch.randn(50, hidden), Candidates(torch.randn(tokens, hidden), log_count)
    )
    which, weight = torch.randint(50, (rows,)), torch.rand(rows)
    inputs = [value for value in (x, head, latent, markov) if value is not None]

    result = distill(
        x,
        Candidates(head, log_count),
        teacher=teacher,
        teacher_rows=which,
        weight=weight,
        ce=0.3,
        latent=latent,
        markov_out=markov,
    )
    found = torch.autograd.grad(2 * result.loss, inputs)

    logits = x @ head.T + log_count + (latent @ markov.T if rank else 0)
    p, log_q = teacher[which], logits.log_softmax(-1)
    tv = 0.5 * (log_q.exp() - p).abs().sum(-1)
    loss = (weight * (0.3 * -(p * log_q).sum(-1) + 0.7 * tv)).sum()
    wanted = torch.autograd.grad(2 * loss, inputs)

    assert_close("loss", loss, result.loss)
    assert_close("overlap", torch.minimum(p, log_q.exp()).sum(-1), result.overlap)
    assert torch.equal(result.agrees, p.argmax(-1) == log_q.argmax(-1))
    for name, ref, got in zip(("hidden", "head", "latent", "markov"), wanted, found, strict=False):
        assert_close(name, ref, got)


def test_sampled_rare_tokens_estimate_the_whole_vocabulary():
    """log(count) makes one candidate stand for many equal tokens: p and q as over all of them."""
    head = torch.randn(6, 8)
    many = torch.cat([head[:5], head[5:].expand(4, -1)])
    x = torch.randn(9, 8)
    few = Candidates(
        head, torch.tensor([0.0] * 5 + [4.0]).where(torch.arange(6) < 5, torch.tensor(4.0).log())
    )
    whole = (x @ many.T).softmax(-1)
    grouped = teacher_probabilities(x, few)
    assert_close("common", whole[:, :5], grouped[:, :5])
    assert_close("rest", whole[:, 5:].sum(-1), grouped[:, 5])


@pytest.mark.parametrize("rank", [0, 3])
def test_an_exported_block_draft_passes_the_check_and_keeps_its_weights(tmp_path, rank):
    draft = make_block(num_layers=2, first_row=0 if rank else 1, rank=rank)
    save_draft(draft, tmp_path)
    assert check_draft(tmp_path) == []
    stored = {name: value.float() for name, value in load_file(tmp_path / "model.safetensors").items()}
    taps = torch.randn(5, len(TAPS) * 32)
    folded = functional.linear(taps, draft.fc.folded())
    assert_close("fc", draft.fc(taps), folded)
    assert torch.equal(stored["fc.weight"], draft.fc.folded().bfloat16().float())
    if rank:
        table = stored["markov_head.markov_w1.weight"]
        trained = draft.markov_head.markov_w1.weight.detach().bfloat16().float()
        assert torch.equal(table[COMMON], trained[:-1])
        rare = sorted(set(range(40)) - set(COMMON.tolist()))
        assert torch.equal(table[rare], trained[-1:].expand(len(rare), -1))


def test_an_exported_eagle3_draft_passes_the_check_and_maps_its_vocabulary(tmp_path):
    draft = make_eagle3()
    save_draft(draft, tmp_path)
    assert check_draft(tmp_path) == []
    offsets = load_file(tmp_path / "model.safetensors")["d2t"]
    assert torch.equal(offsets + torch.arange(len(offsets)), COMMON)


@pytest.mark.parametrize("kind", ["eagle3", "dflash", "dspark"])
def test_a_training_that_starts_from_a_folder_has_its_weights(tmp_path, kind):
    """Other text, hence another feature scale and other common tokens: what was written comes back."""
    makers = {
        "eagle3": make_eagle3,
        "dflash": lambda: make_block(num_layers=2, first_row=1),
        "dspark": lambda: make_block(num_layers=1, first_row=0, rank=3),
    }
    draft = makers[kind]()
    if kind == "dspark":  # fresh tables are the same for all tokens
        for table in draft.markov_head.parameters():
            torch.nn.init.normal_(table)
    save_draft(draft, tmp_path / "first")
    tokens = own_tokens(tmp_path / "first")
    assert tokens is None if kind == "dflash" else torch.equal(tokens, COMMON)
    other = makers[kind]()
    with torch.no_grad():
        other.fc.scale.mul_(1.7)
        for weight in other.parameters():
            weight.add_(1.0)
    take_weights(other, tmp_path / "first")
    save_draft(other, tmp_path / "again")
    first, again = (load_file(tmp_path / name / "model.safetensors") for name in ("first", "again"))
    assert first.keys() == again.keys()
    for name, wanted in first.items():
        if name == "fc.weight":  # multiplied by the scale and divided again, before it is rounded
            torch.testing.assert_close(again[name], wanted, rtol=2**-7, atol=0.0)
        else:
            assert torch.equal(again[name], wanted), name


@pytest.mark.parametrize("maker", [make_eagle3, lambda: make_block(num_layers=1, first_row=1)])
def test_a_training_does_not_start_from_a_draft_of_another_shape(tmp_path, maker):
    save_draft(make_block(num_layers=2, first_row=1), tmp_path)
    with pytest.raises(DraftFolderError, match="shape must be that of the recipe"):
        take_weights(maker(), tmp_path)


def test_a_fresh_draft_guesses_token_frequencies():
    """The start state is the target's mean state: logits near those of the mean, not wide and random."""
    start = make_start()
    state, scale = start.mean_state()
    output = functional.rms_norm(state, state.shape) * start.final_norm * scale
    assert_close("mean state", start.final.mean(0), output)
