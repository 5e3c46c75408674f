"""Where the ssh configuration of clusters lies."""


class SSHConfigHelper:
    ssh_cluster_path = "~/.sky/generated/ssh/{}"
