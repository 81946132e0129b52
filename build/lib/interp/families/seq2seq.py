"""What configs of encoder-decoders have beside the arithmetic: dropout, and defaults of generation."""

IGNORED = (
    *("num_beam_groups", "length_penalty", "early_stopping", "no_repeat_ngram_size", "bad_words_ids"),
    *(
        "forced_bos_token_id",
        "forced_eos_token_id",
        "force_bos_token_to_be_generated",
        "num_return_sequences",
    ),
    *("_num_labels", "classif_dropout", "encoder_layerdrop", "decoder_layerdrop", "dropout_rate"),
)
