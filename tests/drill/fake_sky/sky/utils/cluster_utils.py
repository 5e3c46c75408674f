"""The path of the ssh configuration of clusters."""


class SSHConfigHelper:
    ssh_cluster_path = "~/.sky/generated/ssh/{}"
