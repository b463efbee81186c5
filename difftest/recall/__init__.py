"""Recall experiments: is a planted fact still found as the context grows?"""
