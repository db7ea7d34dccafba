"""KerasHub: presets and folders of Hugging Face in parts, chat data, exports of split models, generation.

The core imports this module if a program has imported KerasHub.
"""

from typing import TYPE_CHECKING

from tfdist.utils.lazy import lazy_names

if TYPE_CHECKING:
    from tfdist.addons.hub.adapters import train_only_adapters as train_only_adapters
    from tfdist.addons.hub.chat.data import chat_batches as chat_batches
    from tfdist.addons.hub.chat.data import read_rows as read_rows
    from tfdist.addons.hub.chat.tokenizer import ChatTokenizer as ChatTokenizer
    from tfdist.addons.hub.documents import separate_documents as separate_documents
    from tfdist.addons.hub.patches import install_hub as install_hub
    from tfdist.addons.hub.peft import export_peft as export_peft
    from tfdist.addons.hub.pipeline_generation import TextGenerator as TextGenerator
    from tfdist.addons.hub.preferences.grpo import GRPO as GRPO
    from tfdist.addons.hub.preferences.losses import PreferenceLoss as PreferenceLoss
    from tfdist.addons.hub.presets import load_preset as load_preset
    from tfdist.addons.hub.verifying import verify_export as verify_export

_PUBLIC = {
    "ChatTokenizer": "tfdist.addons.hub.chat.tokenizer",
    "GRPO": "tfdist.addons.hub.preferences.grpo",
    "PreferenceLoss": "tfdist.addons.hub.preferences.losses",
    "chat_batches": "tfdist.addons.hub.chat.data",
    "export_peft": "tfdist.addons.hub.peft",
    "read_rows": "tfdist.addons.hub.chat.data",
    "separate_documents": "tfdist.addons.hub.documents",
    "train_only_adapters": "tfdist.addons.hub.adapters",
    "verify_export": "tfdist.addons.hub.verifying",
}
_HOMES = {
    **_PUBLIC,
    "TextGenerator": "tfdist.addons.hub.pipeline_generation",
    "install_hub": "tfdist.addons.hub.patches",
    "load_preset": "tfdist.addons.hub.presets",
}

#: `load_preset` is public as `tfdist.load_preset`.
__all__ = [*_PUBLIC]
__getattr__, __dir__ = lazy_names(__name__, _HOMES)
