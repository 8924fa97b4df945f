"""The boards as code: what each shows (`operator`, `latency`, `status`), and how that becomes Grafana's JSON (`render`).

`python -m dashboards.boards` writes `dashboards/*.json`.
"""
