module kimi-operator.io/localcluster/pause

go 1.26.0
