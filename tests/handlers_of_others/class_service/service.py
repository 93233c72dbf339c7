"""Serves with a class; its helper classes live elsewhere, for one class is the rule."""

from collections import Counter

from words import Tokenizer


class WordCount:
    def initialize(self, context):
        self.context = context
        self.tokenizer = Tokenizer()
        self.served = 0

    def handle(self, data, context):
        assert context is self.context
        self.served += 1
        counts = [Counter(self.tokenizer.tokens(row["body"])) for row in data]
        return [{"served": self.served, "counts": dict(count)} for count in counts]
