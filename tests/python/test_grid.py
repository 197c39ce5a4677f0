"""Texts about pictures in models whose tokens have places in three dimensions, through the golden_logits driver: beside a float64
model, beside transformers' own classes, with evictions in the middle of pictures, on every path of the CPU."""
import numpy as np
import pytest
from grid_model import CLASS, GRID, PICTURE, GridReference, picture_ids, places, prompt_of, rows_of, text_config, write_text, write_text_gguf
from test_golden import PATHS, Policy, check_policy, has_path, make_gates, run

KINDS = (("qwen2_5_vl", 0), ("qwen3_vl", 3))
GRIDS = (((3, 5),), ((4, 3), (1, 6)), ((2, 2), (5, 1), (1, 1)))


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return {kind: write_text(tmp_path_factory.mktemp(kind), kind) for kind, _ in KINDS}


def given(folder, rows, deep):
    path = folder / "rows"
    path.write_bytes(rows.tobytes())
    return "--given", str(path), "--deep", str(deep)


def named(ids, rows):
    return dict(zip((token for token in ids if token >= PICTURE), rows))


def logprobs(model, ids, options, *more):
    return np.array(run(model, ids, "--rows", "all", "--exact", "yes", *options, *more)["logprobs"])


def test_places_of_a_grid():
    ids = [1, 2, *picture_ids(2, 3, 0), 3, *picture_ids(1, 1, 1), 4]
    assert ids[2] >= GRID > ids[9] >= PICTURE
    assert places(ids).tolist() == [[0, 0, 0], [1, 1, 1], [2, 2, 2], [2, 2, 3], [2, 2, 4], [2, 3, 2], [2, 3, 3], [2, 3, 4],
                                    [5, 5, 5], [6, 6, 6], [7, 7, 7]]


@pytest.mark.parametrize("kind, deep", KINDS)
@pytest.mark.parametrize("path", PATHS)
def test_texts_about_pictures(models, tmp_path, kind, deep, path):
    if not has_path(path):
        pytest.skip(f"this machine has not {path}")
    for grids in GRIDS:
        ids = prompt_of(grids)
        rows = rows_of(ids, deep)
        wanted = GridReference(models[kind], tmp_path / "text", named(ids, rows)).append(ids)
        options = (*given(tmp_path, rows, deep), "--prompt", str(len(ids) - 20), "--path", path)
        found = logprobs(models[kind], ids, options)
        print(f"{kind} {path} {grids}: {np.abs(found - wanted).max():.1e}")
        assert np.abs(found - wanted).max() < 2e-5
        for splits in ("1", "3,8,1", "7"):  # steps that end inside pictures
            assert (logprobs(models[kind], ids, options, "--splits", splits) == found).all()


def test_older_directories_are_flat(models, tmp_path):
    ids = prompt_of(GRIDS[1])
    rows = rows_of(ids, 0)
    flat = write_text(tmp_path / "flat", "qwen2_5_vl", flat=True)
    options = given(tmp_path, rows, 0)
    assert (logprobs(flat, ids, options) == logprobs(models["qwen2_5_vl"], ids, options)).all()


@pytest.mark.parametrize("kind, deep", KINDS)
@pytest.mark.parametrize("name", ["streaming", "global", "snapkv", "h2o", "d2o", "rkv"])
def test_evictions_inside_pictures(models, tmp_path, kind, deep, name):
    ids = prompt_of(((4, 3), (3, 6)))
    rows, made = rows_of(ids, deep), []
    gates = make_gates(tmp_path / "gates", text_config(kind), "rg10", 5) if name == "global" else None

    def reference(directory, gates):
        made.append(GridReference(directory, tmp_path / "text", named(ids, rows), gates or ""))
        return made[0]

    policy = Policy(name, 16, 8, 20, 2, 0, 64.0)
    result, _ = check_policy(models[kind], gates, policy, ids, len(ids) - 22, kind=reference,
                             options=("--exact", "yes", *given(tmp_path, rows, deep)))
    worst = np.abs(np.array(result["logprobs"]) - np.concatenate(made[0].log)).max()
    print(f"{kind} {name}: {worst:.1e}, {len(result['evictions'])} evictions")
    assert worst < 2e-5


def published(name, text, directory=None):
    """A model of transformers' classes, with the directory's text model, or random."""
    torch = pytest.importorskip("torch")
    import transformers
    from safetensors.numpy import load_file
    torch.manual_seed(1)
    vision = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": 64, "patch_size": 4}
    config = getattr(transformers, name + "Config")(text_config=text, vision_config=vision, image_token_id=299)
    model = getattr(transformers, name + "ForConditionalGeneration")(config).float().eval()
    if directory:
        state = {key: torch.from_numpy(t) for key, t in load_file(directory / "model.safetensors").items()}
        missing, unexpected = model.load_state_dict(state, strict=False)
        assert not unexpected and all(".visual." in key for key in missing)
    return model


def check_published(model, directory, deep, folder):
    """Places are get_rope_index's; log-probabilities those of the language model with these rows."""
    import torch
    for grids in GRIDS:
        ids = prompt_of(grids)
        rows = rows_of(ids, deep)
        pictured = torch.tensor([[token >= PICTURE for token in ids]])
        tokens = torch.tensor([[299 if token >= PICTURE else token for token in ids]])
        grid = torch.tensor([(1, 2 * r, 2 * c) for r, c in grids])
        where, _ = model.model.get_rope_index(tokens, pictured.int(), image_grid_thw=grid)
        assert where[:, 0].T.tolist() == places(ids).tolist()
        more = {}
        if deep:
            more = {"visual_pos_masks": pictured,
                    "deepstack_visual_embeds": [torch.from_numpy(rows[:, 1 + i]) for i in range(deep)]}
        with torch.no_grad():
            x = model.get_input_embeddings()(tokens)
            x[pictured] = torch.from_numpy(rows[:, 0])
            hidden = model.model.language_model(inputs_embeds=x, position_ids=where, **more).last_hidden_state
            wanted = torch.log_softmax(model.lm_head(hidden)[0].double(), -1).numpy()
        worst = np.abs(logprobs(directory, ids, given(folder, rows, deep)) - wanted).max()
        print(f"{directory.name} {grids}: {worst:.1e}")
        assert worst < 2e-5


@pytest.mark.parametrize("kind, deep", KINDS)
def test_transformers_says_the_same(models, tmp_path, kind, deep):
    check_published(published(CLASS[kind], text_config(kind), models[kind]), models[kind], deep, tmp_path)


def test_a_mixture_of_experts(tmp_path):
    text = {**text_config("qwen3_vl"), "model_type": "qwen3_vl_moe_text", "num_experts": 4, "num_experts_per_tok": 2,
            "moe_intermediate_size": 32, "decoder_sparse_step": 1, "norm_topk_prob": True}
    model = published("Qwen3VLMoe", text)
    model.save_pretrained(tmp_path / "moe")
    check_published(model, tmp_path / "moe", 3, tmp_path)


@pytest.mark.parametrize("kind, deep", KINDS)
def test_gguf_files_are_the_same(models, tmp_path, kind, deep):
    ids = prompt_of(GRIDS[1])
    options = given(tmp_path, rows_of(ids, deep), deep)
    file = write_text_gguf(models[kind], tmp_path / "text.gguf")
    assert (logprobs(file, ids, options) == logprobs(models[kind], ids, options)).all()


def test_recurrent_states_beside_attention(tmp_path):
    """Qwen3.5: a quarter of each head rotates, and most layers have states in place of attention."""
    text = {"model_type": "qwen3_5_text", "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
            "head_dim": 32, "intermediate_size": 96, "max_position_embeddings": 4096, "vocab_size": 300, "tie_word_embeddings": False,
            "layer_types": ["linear_attention", "full_attention"] * 2, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
            "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_conv_kernel_dim": 4,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25, "mrope_section": [2, 1, 1],
                                "mrope_interleaved": True}}
    model = published("Qwen3_5", text)
    model.save_pretrained(tmp_path / "states")
    check_published(model, tmp_path / "states", 0, tmp_path)
