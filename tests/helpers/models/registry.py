"""Every model case, by name."""

from __future__ import annotations

import functools

from tests.helpers.models.case import ModelCase, returned_loss
from tests.helpers.models.corners import (
    AliasedOutputs,
    CustomFunctions,
    InplaceEMA,
    MixedDtype,
    MultiOutput,
    SelfAutocast,
    WeightNormWaveNet,
    multi_output_sample,
    spectral_norm,
)
from tests.helpers.models.networks import (
    AlreadyCheckpointed,
    ConvNet,
    Diffusion,
    FourierOperator,
    FrozenBackbone,
    LSTMLanguageModel,
    SharedLayer,
    TiedTransformer,
    UNet,
    sequential,
    stock_transformer,
    wide_activations,
)
from tests.helpers.models.samples import images_and_target, normal, padded_tokens, tokens
from tests.helpers.models.text_and_speech import (
    DECODER,
    ENCODER,
    LARGE_DECODER,
    T5,
    VIT,
    WHISPER,
    t5_sample,
    transformer,
    vit_sample,
    whisper_sample,
)
from tests.helpers.models.vision import densenet121, efficientnet_b0, googlenet, mobilenet_v2, resnet18, vgg16

_transformers = functools.partial(ModelCase, family="transformers", loss=returned_loss)


_torchvision = functools.partial(ModelCase, family="torchvision")


_own = functools.partial(ModelCase, family="own")


CASES: tuple[ModelCase, ...] = (
    _transformers(
        name="gpt2",
        make=transformer("GPT2LMHeadModel", **DECODER, bos_token_id=0, eos_token_id=0),
        sample=tokens(8, 48, 128),
        ci=True,
        note="the head is tied to the embedding",
    ),
    _transformers(
        name="llama",
        make=transformer("LlamaForCausalLM", **DECODER, intermediate_size=172, num_key_value_heads=2),
        sample=tokens(8, 64, 128),
        note="attention is the fused kernel, with its causal flag; as if compiled, it would get a mask",
    ),
    _transformers(
        name="qwen2",
        make=transformer(
            "Qwen2ForCausalLM",
            **DECODER,
            intermediate_size=160,
            num_key_value_heads=2,
            attention_dropout=0.1,
            tie_word_embeddings=True,
        ),
        sample=padded_tokens(8, 48, 128),
        note="tied head; rows are padded, so that both branches build the same mask",
    ),
    _transformers(
        name="mistral",
        make=transformer(
            "MistralForCausalLM",
            **DECODER,
            intermediate_size=160,
            num_key_value_heads=1,
            sliding_window=24,
            attention_dropout=0.1,
        ),
        sample=tokens(8, 48, 128),
        note="the sliding window is shorter than the sequence",
    ),
    _transformers(
        name="mixtral",
        make=transformer(
            "MixtralForCausalLM",
            **DECODER,
            intermediate_size=64,
            num_key_value_heads=2,
            num_local_experts=4,
            num_experts_per_tok=2,
            attention_dropout=0.1,
            output_router_logits=True,
        ),
        sample=tokens(8, 48, 128),
        note="grouped products over experts, under the flag in a custom op; top-k, sort, index; router loss",
    ),
    _transformers(
        name="t5",
        make=transformer("T5ForConditionalGeneration", **T5),
        sample=t5_sample,
        ci=True,
        note="one embedding has three uses; the relative position bias crosses all layers",
    ),
    _transformers(
        name="bert",
        make=transformer("BertForMaskedLM", **ENCODER),
        sample=padded_tokens(8, 48, 128),
        note="a tied weight and a tied bias",
    ),
    _transformers(
        name="roberta",
        make=transformer("RobertaForSequenceClassification", **ENCODER, type_vocab_size=1, num_labels=5),
        sample=padded_tokens(8, 48, 128, padding=1, classes=5),
    ),
    _transformers(name="vit", make=transformer("ViTForImageClassification", **VIT), sample=vit_sample),
    _transformers(
        name="whisper",
        make=transformer("WhisperForConditionalGeneration", **WHISPER),
        sample=whisper_sample,
        note="dropout on transposed tensors; the sinusoid table of the encoder is a frozen parameter",
    ),
    _transformers(
        name="mamba",
        make=transformer(
            "MambaForCausalLM",
            vocab_size=128,
            hidden_size=32,
            state_size=8,
            num_hidden_layers=4,
            time_step_rank=4,
            use_cache=False,
        ),
        sample=tokens(8, 12, 128),
        note="without its kernels a loop over the sequence; traced as if compiled, an associative scan",
    ),
    _torchvision(name="resnet18", make=resnet18, sample=normal(24, 3, 96, 96), ci=True),
    _torchvision(name="vgg16", make=vgg16, sample=normal(16, 3, 64, 64)),
    _torchvision(name="mobilenet_v2", make=mobilenet_v2, sample=normal(8, 3, 64, 64), ci=True),
    _torchvision(
        name="googlenet",
        make=googlenet,
        sample=normal(8, 3, 96, 96),
        note="auxiliary logits",
    ),
    _torchvision(name="densenet121", make=densenet121, sample=normal(8, 3, 64, 64)),
    _torchvision(
        name="efficientnet_b0",
        make=efficientnet_b0,
        sample=normal(8, 3, 64, 64),
        note="stochastic depth per row",
    ),
    _own(
        name="unet_dropout",
        make=lambda: UNet(8),
        sample=images_and_target(4, 64),
        loss=returned_loss,
        ci=True,
        note="dropout of whole channels",
    ),
    _own(
        name="lstm",
        make=lambda: LSTMLanguageModel(64, 32),
        sample=tokens(32, 12, 64),
        loss=returned_loss,
        ci=True,
        note="eager runs a layer as one oneDNN op; torch 2.13's decomposition forgets the dropout",
    ),
    _own(name="sequential", make=sequential, sample=normal(8, 3, 32, 32), note="an nn.Sequential root"),
    _own(
        name="tied_weights",
        make=lambda: TiedTransformer(128, 64, 64),
        sample=tokens(8, 64, 128),
        loss=returned_loss,
        note="modules, not parameters alone, appear under two names",
    ),
    _own(
        name="frozen",
        make=lambda: FrozenBackbone(64),
        sample=normal(8, 3, 32, 32),
        note="most parameters have no gradient; a submodule is in eval mode",
    ),
    _own(
        name="fft", make=lambda: FourierOperator(12, 4), sample=images_and_target(4, 32), loss=returned_loss
    ),
    _own(name="multi_output", make=lambda: MultiOutput(48), sample=multi_output_sample),
    _own(name="alias_outputs", make=lambda: AliasedOutputs(32), sample=normal(16, 32, 32)),
    _own(
        name="inplace_ema",
        make=lambda: InplaceEMA(32, 24),
        sample=normal(16, 32, 32),
        loss=returned_loss,
        note="a buffer is read, updated and read again, three times a forward",
    ),
    _own(
        name="diffusion",
        make=lambda: Diffusion(16),
        sample=normal(8, 3, 16, 16),
        loss=returned_loss,
        note="draws time steps and noise in the forward",
    ),
    _own(name="mixed_dtype", make=lambda: MixedDtype(48), sample=normal(16, 32, 48)),
    _own(name="self_autocast", make=lambda: SelfAutocast(48), sample=normal(16, 32, 48)),
    _own(
        name="weight_norm", make=lambda: WeightNormWaveNet(16), sample=normal(8, 1, 256), loss=returned_loss
    ),
    _own(
        name="spectral_norm",
        make=spectral_norm,
        sample=normal(8, 3, 32, 32),
        note="each forward moves the buffers of the power iteration",
    ),
    _own(
        name="shared_layer",
        make=lambda: SharedLayer(48),
        sample=normal(16, 32, 48),
        note="a parameter is never used: its gradient stays None",
    ),
    _own(
        name="checkpointed",
        make=lambda: AlreadyCheckpointed(48),
        sample=normal(32, 32, 48),
        note="a captured graph saves what the checkpoints would not: saving all of it peaks above eager",
    ),
    _own(name="stock_transformer", make=stock_transformer, sample=normal(16, 32, 48)),
    _own(name="custom_function", make=lambda: CustomFunctions(8), sample=normal(4, 1, 12, 16, 16)),
)


# Tensors of several megabytes, with which the ways that work in chunks begin. Too slow for every test.
LARGE_CASES: tuple[ModelCase, ...] = (
    _transformers(
        name="large_vocabulary",
        make=transformer("GPT2LMHeadModel", **DECODER | LARGE_DECODER, bos_token_id=0, eos_token_id=0),
        sample=tokens(8, 256, LARGE_DECODER["vocab_size"]),
        note="logits of 32 MiB are most of the step; the activation of each MLP is a chain of 4 MiB",
    ),
    _own(
        name="large_images",
        make=lambda: ConvNet(32),
        sample=normal(16, 3, 64, 64),
        loss=returned_loss,
        note="batch norms, whose backwards need three tensors of 8 MiB",
    ),
    _own(
        name="large_activations",
        make=lambda: wide_activations(2048, 3),
        sample=normal(1024, 32),
        note="activations that are chains of eight calls on 8 MiB",
    ),
)


CI_CASES: tuple[ModelCase, ...] = tuple(case for case in CASES if case.ci)


def get_case(name: str) -> ModelCase:
    """The case called `name`."""
    by_name = {case.name: case for case in (*CASES, *LARGE_CASES)}
    if name not in by_name:
        raise KeyError(f"no model case {name!r}; there are {', '.join(by_name)}")
    return by_name[name]
