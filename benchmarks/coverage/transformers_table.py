"""Which architectures of transformers are built, and what each needs beyond the sizes that all get."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["ARCHITECTURES", "Architecture"]


@dataclass(frozen=True)
class Architecture:
    """One architecture.

    Attributes:
        model_type: As in `transformers.CONFIG_MAPPING`.
        kind: What it is for.
        inputs: Which inputs it is called with.
        head: Class of the model; empty for the one without a head.
        shape: Of its main input, without the batch; empty for the usual one.
        config: Fields of its configuration that cannot be the usual ones.
    """

    model_type: str
    kind: str
    inputs: str
    head: str = ""
    shape: tuple[int, ...] = ()
    config: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.model_type}:{self.head}" if self.head else self.model_type


def _plain(kind: str, inputs: str, names: str) -> list[Architecture]:
    return [Architecture(name, kind, inputs) for name in names.split()]


_TEXT_ENCODERS = [
    *_plain(
        "text encoder",
        "text",
        "albert bert bert-generation camembert convbert data2vec-text deberta deberta-v2 distilbert electra ernie "
        "eurobert flaubert fnet ibert luke megatron-bert mobilebert modernbert mpnet mra nomic_bert "
        "nystromformer rembert roberta roberta-prelayernorm roc_bert roformer splinter squeezebert xlm xlm-roberta "
        "xlm-roberta-xl xlnet yoso jina_embeddings_v3 canine funnel longformer big_bird markuplm "
        "siglip_text_model",
    ),
    Architecture("bert", "text encoder", "text", "BertForSequenceClassification"),
    Architecture("roberta", "text encoder", "text", "RobertaForMaskedLM"),
    Architecture("xmod", "text encoder", "text", config={"languages": ["en_XX"], "default_language": "en_XX"}),
    Architecture("esm", "text encoder", "text", config={"vocab_size": 256, "mask_token_id": 4}),
]

# Attention by latent keys and values, whose heads have a part that is rotated and one that is not.
_LATENT = {
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "head_dim": 16,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
}

_DECODERS = [
    *_plain(
        "decoder",
        "tokens",
        "gpt2 gpt_neox gpt_bigcode opt bloom falcon llama mistral qwen2 qwen3 gemma gemma2 "
        "gemma3_text gemma4_text phi phi3 cohere cohere2 olmo olmo2 olmo3 stablelm starcoder2 persimmon "
        "granite diffllama ernie4_5 exaone4 glm glm4 helium internlm3 mpt "
        "nanochat openai-gpt ctrl biogpt xglm smollm3 seed_oss vaultgemma apertus arcee bitnet doge lfm2 "
        "modernbert-decoder gpt_neox_japanese imagegpt cpmant",
    ),
    Architecture("llama", "decoder", "text", "LlamaForCausalLM"),
    Architecture("gpt2", "decoder", "text", "GPT2LMHeadModel"),
    Architecture("nemotron", "decoder", "tokens", config={"head_dim": 16, "num_key_value_heads": 2}),
    Architecture("gemma3n_text", "decoder", "tokens", config={"num_kv_shared_layers": 0}),
    Architecture("minicpm3", "decoder", "tokens", config=_LATENT | {"num_key_value_heads": 4}),
    Architecture("gpt_neo", "decoder", "tokens", config={"attention_types": [[["global", "local"], 1]]}),
    Architecture("gptj", "decoder", "tokens", config={"rotary_dim": 8}),
    Architecture("codegen", "decoder", "tokens", config={"rotary_dim": 8}),
]

_EXPERTS = [
    *_plain(
        "mixture of experts",
        "tokens",
        "mixtral qwen2_moe qwen3_moe olmoe phimoe granitemoe granitemoeshared gpt_oss "
        "ernie4_5_moe glm4_moe jetmoe minimax flex_olmo",
    ),
    Architecture(
        "deepseek_v2",
        "mixture of experts",
        "tokens",
        config=_LATENT | {"num_key_value_heads": 4, "num_experts_per_tok": 2},
    ),
    Architecture(
        "deepseek_v3",
        "mixture of experts",
        "tokens",
        config={
            "qk_rope_head_dim": 16,
            "num_key_value_heads": 4,
            "qk_nope_head_dim": 16,
            "v_head_dim": 16,
            "q_lora_rank": 32,
            "kv_lora_rank": 32,
            "n_group": 2,
            "topk_group": 1,
        },
    ),
    Architecture(
        "dots1",
        "mixture of experts",
        "tokens",
        config={"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 1},
    ),
    Architecture(
        "lfm2_moe",
        "mixture of experts",
        "tokens",
        config={"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    ),
]

_STATE_SPACE = [
    *_plain(
        "state space",
        "tokens",
        "mamba falcon_mamba falcon_h1 jamba bamba recurrent_gemma xlstm granitemoehybrid "
        "qwen3_next nemotron_h olmo_hybrid",
    ),
    Architecture(
        "kimi_linear",
        "state space",
        "tokens",
        config={"num_experts_per_token": 2, "num_expert_group": 1, "topk_group": 1},
    ),
    Architecture("rwkv", "state space", "tokens", config={"rescale_every": 0}),
    Architecture("mamba2", "state space", "tokens", config={"num_heads": 8, "head_dim": 16, "n_groups": 1}),
    Architecture(
        "zamba",
        "state space",
        "tokens",
        config={"num_hidden_layers": 6, "layer_types": ["mamba", "mamba", "hybrid"] * 2},
    ),
]

_ENCODER_DECODERS = _plain(
    "encoder-decoder",
    "two texts",
    "bart t5 mt5 umt5 longt5 switch_transformers mbart pegasus pegasus_x marian m2m_100 nllb-moe blenderbot "
    "blenderbot-small led prophetnet fsmt plbart bigbird_pegasus mvp ",
)

_VISION = [
    *_plain(
        "vision",
        "image",
        "vit deit beit data2vec-vision dinov2 dinov2_with_registers dinov3_vit dinov3_convnext ijepa vit_mae vit_msn "
        "convnext convnextv2 cvt levit mobilenet_v1 mobilenet_v2 poolformer "
        "pvt pvt_v2 regnet resnet bit segformer swiftformer focalnet siglip_vision_model "
        "clip_vision_model detr conditional_detr table-transformer yolos maskformer-swin textnet vitdet "
        "glpn sam_vision_model hgnet_v2 aimv2_vision_model mlcd_vision_model",
    ),
    Architecture("hiera", "vision", "image", "", (3, 224, 224), {"image_size": [224, 224]}),
    Architecture("efficientnet", "vision", "image", config={"hidden_dim": 2560}),
    Architecture("swin", "vision", "image", "", (3, 224, 224), {"image_size": 224, "patch_size": 4}),
    Architecture("swinv2", "vision", "image", "", (3, 224, 224), {"image_size": 224, "patch_size": 4}),
    Architecture("donut-swin", "vision", "image", "", (3, 224, 224), {"image_size": 224, "patch_size": 4}),
    Architecture("mobilevit", "vision", "image", config={"patch_size": 2}),
    Architecture("mobilevitv2", "vision", "image", config={"patch_size": 2}),
    Architecture(
        "dpt",
        "vision",
        "image",
        "DPTForDepthEstimation",
        config={"num_hidden_layers": 4, "backbone_out_indices": [0, 1, 2, 3]},
    ),
    Architecture("depth_anything", "vision", "image", "DepthAnythingForDepthEstimation"),
    Architecture("segformer", "vision", "image", "SegformerForSemanticSegmentation"),
    Architecture("mobilevit", "vision", "image", "MobileViTForSemanticSegmentation", config={"patch_size": 2}),
    Architecture("upernet", "vision", "image", "UperNetForSemanticSegmentation"),
    Architecture("rt_detr", "vision", "image"),
    Architecture("rt_detr_v2", "vision", "image"),
    Architecture("d_fine", "vision", "image"),
    Architecture("deformable_detr", "vision", "image"),
    Architecture("mask2former", "vision", "image"),
    Architecture("maskformer", "vision", "image"),
    Architecture("superpoint", "vision", "image", "SuperPointForKeypointDetection"),
    Architecture(
        "swin2sr",
        "vision",
        "image",
        "Swin2SRForImageSuperResolution",
        config={"embed_dim": 36, "depths": [2, 2], "num_heads": [6, 6], "num_layers": 2, "patch_size": 1},
    ),
    Architecture("timesformer", "video", "video"),
    Architecture("videomae", "video", "video", config={"tubelet_size": 2}),
    Architecture("vivit", "video", "video", config={"tubelet_size": [2, 16, 16]}),
]

_VISION_TEXT = [
    *_plain(
        "vision and text",
        "image and text",
        "clip siglip altclip chinese_clip groupvit owlvit vilt bridgetower git blip metaclip_2",
    ),
    Architecture("align", "vision and text", "image and text", config={"projection_dim": 640}),
    Architecture("clipseg", "vision and text", "image and text", "CLIPSegModel"),
    Architecture("layoutlm", "document", "document"),
    Architecture("lilt", "document", "document", config={"hidden_size": 96, "intermediate_size": 192}),
]

_SPEECH = [
    *_plain(
        "speech",
        "wave",
        "wav2vec2 hubert wavlm sew sew-d unispeech unispeech-sat data2vec-audio wav2vec2-conformer",
    ),
    Architecture("wav2vec2", "speech", "wave", "Wav2Vec2ForCTC"),
    Architecture("whisper", "speech", "features and text", "", (80, 128), {"max_source_positions": 64}),
    Architecture("speech_to_text", "speech", "features and text", "", (64, 80)),
    Architecture("moonshine", "speech", "wave and text"),
    Architecture("wav2vec2-bert", "speech", "features", "", (64, 160)),
    Architecture("parakeet_encoder", "speech", "features", "", (64, 80)),
    Architecture("audio-spectrogram-transformer", "speech", "wave", "", (128, 128), {"max_length": 128}),
    Architecture("encodec", "speech", "wave", "", (1, 3200)),
    Architecture("dac", "speech", "wave", "", (1, 3200)),
    Architecture("mimi", "speech", "wave", "", (1, 3840), {"hidden_size": 512}),
    Architecture("speecht5_hifigan", "speech", "spectrogram", "SpeechT5HifiGan", (32, 80)),
    Architecture("patchtst", "time series", "past values", "", (32, 1)),
    Architecture("patchtsmixer", "time series", "past values", "", (32, 1)),
]

ARCHITECTURES: tuple[Architecture, ...] = (
    *_TEXT_ENCODERS,
    *_DECODERS,
    *_EXPERTS,
    *_STATE_SPACE,
    *_ENCODER_DECODERS,
    *_VISION,
    *_VISION_TEXT,
    *_SPEECH,
)
