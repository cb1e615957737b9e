"""Tokenizers and models: built from scratch, saved, loaded, and refused in one line when they are bad."""

import json
import os

import pytest
import torch
from test_logprobs import CPU, FAMILIES, family, ragged

import model as lm
import rewards
from config import Config

TEXTS = [
    "History:\nThe Café (1991)\n東京物語 (1953)\n🎬 Movie 👩‍👩‍👧\n\nPool:\n  two  spaces\tand a tab \n",
    "<SLATE>\nThe Café (1991)\n東京物語 (1953)\n</SLATE>\n<RANK>\nThe Café (1991)\n</RANK>",
    "carriage\r\nreturn\u00a0no-break\u2028line\u200b e\u0301 \ufeff",
    " leading", "trailing \n", "\n", " ", "\n\n\n", "",
]  # fmt: skip


@pytest.fixture(autouse=True)
def no_progress_bars():
    from transformers.utils import logging

    logging.disable_progress_bar()  # as importing model does; another test may want to see errors alone


def error_of(capsys, call) -> str:
    """The one line on stderr of a call that must end with exit code 2."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        call()
    assert stop.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1, lines
    return lines[0]


def small(**settings) -> Config:
    return Config(max_prompt=64, max_new_tokens=32, **settings)


# ---------------------------------------------------------------------------------------------------------------------
# Tokenizers built from scratch


@pytest.mark.parametrize("kind", ("word", "line", "byte"))
def test_a_tokenizer_from_scratch_returns_every_text_exactly_before_and_after_saving(kind, tmp_path):
    """Ids -> text is the identity, white space and all; AutoTokenizer must not rebuild it for the model beside it.

    The folder also holds a Qwen3 config.json: by model type alone transformers would take Qwen2's own tokenizer.
    """
    from transformers import AutoTokenizer

    built = lm.build_tokenizer(kind, TEXTS)
    lm.save(lm.build(small(width=32, layers=1), built), built, str(tmp_path))
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    pieces = rewards.token_bytes(loaded)
    assert pieces == rewards.token_bytes(built)
    for text in TEXTS:
        ids = built(text, add_special_tokens=False)["input_ids"]
        assert ids == loaded(text, add_special_tokens=False)["input_ids"]
        assert built.decode(ids) == text == loaded.decode(ids) == rewards.join([pieces[i] for i in ids])
        assert built.unk_token_id not in ids
    assert len(loaded) == len(built)
    for token in ("eos_token_id", "pad_token_id", "unk_token_id"):
        assert getattr(loaded, token) == getattr(built, token) is not None
    assert loaded.chat_template is None and loaded.bos_token_id is None


def test_a_word_is_a_token_with_its_space_a_line_is_a_token_with_its_break():
    count = {
        k: len(lm.build_tokenizer(k, ["Alien (1979)\nHeat\n"])("Alien (1979)\nHeat\n")["input_ids"]) for k in lm.PIECES
    }
    assert count == {"word": 3, "line": 2}
    word = lm.build_tokenizer("word", ["a b"])
    assert word("a zzz")["input_ids"][-1] == word.unk_token_id  # a word never seen


@pytest.mark.parametrize("kind", ("word", "line"))
def test_titles_that_no_example_shows_are_known_from_the_pool(kind):
    """A catalog in the weights: demonstrations miss most titles, answers may still name any."""
    import data

    example = data.Example(
        "1", "History:\nA one\n", ["A one", "Never shown 東"], {"A one": 1.0}, "<SLATE>\nA one\n</SLATE>"
    )
    tokenizer = lm.load_tokenizer(Config(tokenizer=kind), [example])
    text = "Never shown 東\n"
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.unk_token_id not in ids and tokenizer.decode(ids) == text


# ---------------------------------------------------------------------------------------------------------------------
# Models


@pytest.mark.parametrize("name", FAMILIES)
def test_saved_and_loaded_models_give_the_same_log_probs_and_keep_their_heads_tied_or_not(name, tmp_path):
    """Fp32 weights; a tied head is one tensor after loading, an untied one is its own and is not lost."""
    model = family(name)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.01 * torch.randn_like(p))  # weights no initialisation gives
    lm.save(model, lm.build_tokenizer("byte", []), str(tmp_path))
    loaded = lm.load(small(init=str(tmp_path)), None, CPU)
    assert type(loaded) is type(model) and {p.dtype for p in loaded.parameters()} == {torch.float32}
    tied = name in ("qwen3", "hybrid", "smollm2", "gpt2")
    assert loaded.config.tie_word_embeddings == tied
    assert (loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight) == tied
    assert sum(p.numel() for p in loaded.parameters()) == sum(p.numel() for p in model.parameters())
    state = loaded.state_dict()
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    assert torch.equal(lm.completion_logp(model, *ragged())[0], lm.completion_logp(loaded, *ragged())[0])


def test_half_precision_checkpoints_become_float32_master_weights(tmp_path):
    """F38: bfloat16 weights of 0.02 do not move by an update of 1e-6."""
    family("llama").bfloat16().save_pretrained(tmp_path)
    loaded = lm.load(small(init=str(tmp_path)), None, CPU)
    assert {p.dtype for p in loaded.parameters()} == {torch.float32}


def test_a_vision_language_checkpoint_loads_as_its_text_model(tmp_path):
    """Qwen3.5 is published with a vision tower; only the language model is wanted, with its weights."""
    from test_logprobs import configuration
    from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

    vision = dict(depth=1, hidden_size=32, num_heads=2, intermediate_size=32, out_hidden_size=32)
    config = Qwen3_5Config(
        text_config=configuration("hybrid").to_dict(), vision_config=vision, tie_word_embeddings=True
    )
    published = Qwen3_5ForConditionalGeneration(config)
    published.save_pretrained(tmp_path)
    loaded = lm.load(small(init=str(tmp_path)), None, CPU)
    assert torch.equal(loaded.model.embed_tokens.weight, published.model.language_model.embed_tokens.weight)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert not any("visual" in k for k in loaded.state_dict())


@pytest.mark.parametrize("tie", (True, False))
def test_a_model_from_scratch_fits_its_tokenizer_and_depends_on_the_seed_alone(tie):
    tokenizer = lm.build_tokenizer("word", TEXTS)
    torch.manual_seed(99)
    one = lm.load(small(width=64, layers=3, tie=tie, seed=5), tokenizer, CPU)
    torch.manual_seed(1)
    two, other = (lm.load(small(width=64, layers=3, tie=tie, seed=s), tokenizer, CPU) for s in (5, 6))
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters()))
    assert not torch.equal(one.lm_head.weight, other.lm_head.weight)
    assert one.config.vocab_size == len(tokenizer) and one.config.num_hidden_layers == 3
    assert (one.lm_head.weight is one.model.embed_tokens.weight) == tie
    assert lm.stop_ids(one, tokenizer) == [tokenizer.eos_token_id]


def test_stop_ids_come_from_the_tokenizer_and_both_configs_one_id_or_a_list():
    """F12: with one of several end tokens unknown, 97 % of the completions looked cut off."""
    from types import SimpleNamespace as Some

    def ids(tokenizer, generation, model):
        return lm.stop_ids(Some(generation_config=Some(eos_token_id=generation), config=Some(eos_token_id=model)),
                           Some(eos_token_id=tokenizer))  # fmt: skip

    assert ids(7, [5, 6], 5) == [5, 6, 7]
    assert ids(7, None, [9, 7]) == [7, 9]
    assert ids(None, 0, None) == [0]  # 0 is an id
    assert ids(None, None, None) == []
    assert lm.stop_ids(Some(generation_config=None, config=Some()), Some(eos_token_id=3)) == [3]


def test_lengths_beyond_the_positions_of_the_model_are_refused(tmp_path, capsys):
    """GPT-2 would fail in the middle of a run, others would extrapolate in silence."""
    family("gpt2").save_pretrained(tmp_path)
    message = error_of(
        capsys, lambda: lm.load(Config(init=str(tmp_path), max_prompt=100, max_new_tokens=29), None, CPU)
    )
    assert "128 positions" in message and "--max_prompt" in message


# ---------------------------------------------------------------------------------------------------------------------
# --init


def folders(root, *names):
    for name in names:
        (root / "checkpoints" / name).mkdir(parents=True)
    return str(root)


def test_a_run_folder_stands_for_its_best_checkpoint_or_else_its_last(tmp_path, capsys):
    run = folders(tmp_path / "a", "step-000009", "step-000010", ".step-000011", "step-tmp")
    assert lm.checkpoint_of(run) == os.path.join(run, "checkpoints", "step-000010")
    os.symlink("step-000009", os.path.join(run, "checkpoints", "best"))
    assert lm.checkpoint_of(run) == os.path.join(run, "checkpoints", "best")
    for name in ("Qwen/Qwen3-4B", "a/b.gguf", str(tmp_path)):
        assert lm.checkpoint_of(name) == name
    empty = folders(tmp_path / "b", ".step-000001")
    assert "no checkpoint yet" in error_of(capsys, lambda: lm.checkpoint_of(empty))


def test_the_best_checkpoint_of_a_run_folder_is_what_gets_loaded(tmp_path):
    run = tmp_path / "run" / "checkpoints"
    for step, seed in (("step-000001", 1), ("step-000002", 2)):
        lm.save(family("llama", seed=seed), lm.build_tokenizer("byte", []), str(run / step))
    last = lm.load(small(init=str(tmp_path / "run")), None, CPU)
    os.symlink("step-000001", run / "best")
    best = lm.load(small(init=str(tmp_path / "run")), None, CPU)
    for model, seed in ((last, 2), (best, 1)):
        assert torch.equal(model.lm_head.weight, family("llama", seed=seed).lm_head.weight)
    assert len(lm.load_tokenizer(small(init=str(tmp_path / "run")))) == 259


def test_a_bad_init_ends_in_one_line_that_names_it(tmp_path, capsys, monkeypatch):
    """Missing, empty, damaged or cut files: exit code 2, no traceback, what was given and why it failed."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    good = tmp_path / "good"
    lm.save(family("llama"), lm.build_tokenizer("byte", []), str(good))

    def broken(name, file, content):
        place = tmp_path / name
        place.mkdir()
        for f in os.listdir(good):
            (place / f).write_bytes((good / f).read_bytes())
        (place / file).write_bytes(content)
        return str(place)

    whole = (good / "model.safetensors").read_bytes()
    (tmp_path / "empty").mkdir()
    for bad in (
        str(tmp_path / "nowhere"), "no-such-owner/no-such-model", str(tmp_path / "empty"), str(tmp_path / "none.gguf"),
        broken("json", "config.json", b'{"model_type": "llama", '), broken("kind", "config.json", b'{"model_type": "x9"}'),
        broken("cut", "model.safetensors", whole[: len(whole) // 2]), broken("zero", "model.safetensors", b""),
    ):  # fmt: skip
        message = error_of(capsys, lambda bad=bad: lm.load(small(init=bad), None, CPU))
        assert f"--init {bad}: cannot load it" in message and len(message.split(": ")[-1]) > 3
    for bad in (str(tmp_path / "empty"), broken("tok", "tokenizer.json", b"{}")):
        assert f"--init {bad}: cannot load it" in error_of(capsys, lambda bad=bad: lm.load_tokenizer(small(init=bad)))


def test_code_of_a_checkpoint_is_not_run_unless_it_is_trusted(tmp_path, capsys, monkeypatch):
    """A hub model may bring Python files; by default such a model is refused and nothing of it is executed."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("builtins.input", lambda *a: "y")  # nobody is asked
    ran = tmp_path / "ran"
    code = f"open({str(ran)!r}, 'w')\nclass C: pass\n"
    (tmp_path / "code.py").write_text(code)
    classes = {"AutoConfig": "code.C", "AutoModelForCausalLM": "code.C", "AutoTokenizer": ["code.C", None]}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "their-own", "auto_map": classes}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "C", "auto_map": classes}))
    assert Config().trust_remote_code is False
    cfg = small(init=str(tmp_path))
    for call in (lambda: lm.load(cfg, None, CPU), lambda: lm.load_tokenizer(cfg)):
        assert "--trust_remote_code true" in error_of(capsys, call)
    assert not ran.exists()
