"""An agent program that Mettle did not write as the harness: a proxy that it takes for the model's API.

    calls.py               one call, whatever API it came by (`mettle.clients.dialects` reads and answers them)
    memory.py              an agent repeats the conversation; its messages are recognised as those that were sampled
    sessions.py            one rollout: secret, calls in flight, repeated requests
    server.py              the HTTP side
    recorder.py            calls to trajectory steps, within the environment's limits
    agent.py               one agent at work in a machine, and the way from there to the proxy
    monitor.py             what became of an agent, as metrics
    machines.py            an agent's machine, used from any event loop

`mettle.envs.cli_agent_env` puts them together. Invariant: each answer that reached the agent is one step of its
rollout, with the ids that were sampled; what the agent rewrote branches, and no text is tokenized to guess what was
said.
"""
