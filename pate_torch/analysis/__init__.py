"""Measuring learners and sizing plans (BTT18, NB20, DF20, WLF16, LZCW21).

On public or synthetic data these guide the choice of K and T before any budget is spent. Run on private votes or
private records their results are PRIVATE.
"""
