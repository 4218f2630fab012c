"""Tokenizer transfer: a model with the vocabulary of another tokenizer.

V' new ids, V old ids, D hidden, N anchors, K atoms. ``row_sources`` says what each new token is
made of, ``shares`` turns that into weights of old rows, ``matching_pursuit`` finds such weights in
the space of another model, and ``write_model`` streams the checkpoint. ``audit`` compares two
tokenizers before anything is written, ``probe`` ranks candidates after a few optimizer steps.
"""
