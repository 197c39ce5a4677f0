"""The independent models of encoders beside the published classes, where torch and transformers are installed."""
import json

import numpy as np
import pytest
from encoder import WORDS, Encoder, write_model
from windowed_encoder import WINDOWED, WindowedEncoder, write_windowed


@pytest.mark.parametrize("kind", ["bert", "roberta", "xlm-roberta", *WINDOWED])
def test_hidden_states_are_those_of_transformers(tmp_path, kind):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    model = (write_windowed if kind in WINDOWED else write_model)(tmp_path, kind)
    published = transformers.AutoModel.from_pretrained(model, dtype=torch.float64, attn_implementation="eager").eval()
    reference = (WindowedEncoder if kind in WINDOWED else Encoder)(model)
    ids = np.random.default_rng(5).integers(5, len(WORDS), 70).tolist()
    with torch.no_grad():
        states = published(torch.tensor([ids])).last_hidden_state[0].numpy()
    found = reference.hidden(ids)
    print(json.dumps({kind: float(np.abs(found - states).max())}))
    assert np.abs(found - states).max() < 1e-5 * np.abs(states).max()
