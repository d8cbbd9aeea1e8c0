"""Models that the Hub answers with under `/v1`: those of its operator, and versions and adapters of hosted runs.

Parts: `models` (which there are, and whose), `engines` (a process for each while it is asked), `program` (what such a
process is), `answers` (a request passed on, its tokens counted). Invariant: who asks for a model may see its run.
"""
