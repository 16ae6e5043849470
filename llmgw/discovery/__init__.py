"""What the node has: texts of nvidia-smi, /proc and package metadata in, facts out. Called by the daemon, `check` and
`inventory`. It never decides what may run: that is for `preflight` and `placement`. Pure but for `survey`, `installed`
and `pci`.
"""
