"""Models of other libraries, loaded and saved: TransformerLens' HookedTransformer and TransformerBridge, and llama2.c.

```python
from interp.compat import from_bridge, from_hooked_transformer, load_hooked, load_llama2c, to_hooked_state

model = load_hooked("grokking.pth")                     # a saved HookedTransformer; nothing in the file is run
model = from_hooked_transformer(theirs.state_dict(), theirs.cfg)
model = from_bridge(TransformerBridge.boot_transformers("gpt2"))
model = load_llama2c("stories15M.bin", "tokenizer.bin")
state, config = to_hooked_state(model)                  # back, in TransformerLens' layout
```

Code written for TransformerLens 3 runs on `interp.compat.transformer_lens`; `install()` makes `import transformer_lens`
mean that, for libraries that cannot be edited.

`transformer_lens` itself is never imported: `from_bridge` takes a live bridge.
"""

from interp.compat.bridge import from_bridge
from interp.compat.hooked_export import to_hooked_state
from interp.compat.hooked_file import load_hooked
from interp.compat.hooked_state import from_hooked_transformer
from interp.compat.llama2c import load_llama2c
from interp.compat.transformer_lens.install import install, uninstall

__all__ = [
    "from_bridge",
    "from_hooked_transformer",
    "install",
    "load_hooked",
    "load_llama2c",
    "to_hooked_state",
    "uninstall",
]
