"""Attention by cqs at the extension points of other libraries, each imported when it is used."""
