"""Rules against rewards that can be had without the answer: read off the source, and found by trying."""
