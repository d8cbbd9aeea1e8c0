"""The Hub: the lab's web server. Here it is the live run page, read-only over run directories.

Parts: `app` puts the rest together; `catalog` finds the runs in a folder; `reader` reads one of them, with `steps`
(figures a step), `metrics`, `series` (what is drawn), `summary` (the headline) and `pipeline` (who waits for whom);
`rollouts`, `vocabulary` and `conversation` open a rollout with its tokens; `provenance` and `logs` show the config and
the logs; `models` and `api` are the JSON API, `pages` and `wording` the HTML; `security`, `config` and `server` are the
outside.
Invariant: nothing here changes a run, and nothing that a browser loads comes from another host.
"""
