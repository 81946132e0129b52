"""A live page on this machine: a prompt, edits by a click, and what they change; clean and edited side by side.

`asks` reads requests, whose edits are the package's own as JSON; `changes` looks up the values that they stand for,
`snippet` writes them as Python, `session` runs them, `answers` makes the numbers ready; `jobs`, `guard`, `app` and
`server` put it on the loopback interface. A request is data throughout: no code is ever evaluated from one. Needs the
extra `serve`.
"""
