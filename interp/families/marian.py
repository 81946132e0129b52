"""Marian: BART with sinusoids for positions, no norm after the embeddings, and one vocabulary or two.

The sinusoids are computed, not loaded: tables of them in a checkpoint are not read.
"""

from dataclasses import replace

from interp.families import bart
from interp.families.spec import Family, Settings, TensorRule
from interp.model.config import EncoderDecoderConfig, Sinusoidal


def config(settings: Settings) -> EncoderDecoderConfig:
    """Our config of a Marian checkpoint."""
    position = Sinusoidal(interleaved=False)
    encoder, decoder = (bart.stack(settings, side, position) for side in ("encoder", "decoder"))
    shared = settings.flag("share_encoder_decoder_embeddings", True)
    d_vocab = settings.count("decoder_vocab_size", encoder.d_vocab)
    if shared and d_vocab != encoder.d_vocab:
        raise ValueError(
            f"Marian: config asks for shared embeddings and two vocabularies, vocab_size={encoder.d_vocab} and "
            f"decoder_vocab_size={d_vocab}"
        )
    tied = settings.flag("tie_word_embeddings", True)
    return EncoderDecoderConfig(
        encoder,
        replace(decoder, d_vocab=d_vocab, tied=tied),
        start_token=settings.integer("decoder_start_token_id", 58_100),
        shared_embedding=shared and tied,
    )


def rules(config: EncoderDecoderConfig) -> tuple[TensorRule, ...]:
    """The weight table."""
    return bart.stack_rules(config)


FAMILY = Family(
    name="Marian",
    model_types=("marian",),
    config=config,
    rules=rules,
    prefix="model.",
    unused=(r"model\.shared\.weight",),
    outside=("lm_head.", "final_logits_bias"),
    buffers=(r"model\.(encoder|decoder)\.embed_positions\.weight",),
    duplicates=bart.duplicates,
)
