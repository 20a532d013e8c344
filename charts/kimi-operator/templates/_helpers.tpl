{{- define "kimi-operator.name" -}}
{{- if contains .Chart.Name .Release.Name -}}
{{- .Release.Name | trunc 52 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name .Chart.Name | trunc 52 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "kimi-operator.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "kimi-operator.name" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- required "serviceAccount.name is needed when serviceAccount.create is false" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{- define "kimi-operator.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "kimi-operator.labels" -}}
{{ include "kimi-operator.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/component: operator
app.kubernetes.io/part-of: kimi
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{- define "kimi-operator.image" -}}
{{- printf "%s:%s" .image.repository (default .context.Chart.AppVersion .image.tag) -}}
{{- end -}}

{{/* Annotations of what exists only while an upgrade is prepared. */}}
{{- define "kimi-operator.hook" -}}
helm.sh/hook: pre-upgrade
helm.sh/hook-weight: {{ .weight | quote }}
helm.sh/hook-delete-policy: before-hook-creation,hook-succeeded
{{- end -}}

{{/* What the schema cannot compare. */}}
{{- define "kimi-operator.checkLease" -}}
{{- $times := .Values.leaderElection -}}
{{- $retry := mulf 1.2 $times.retryPeriodSeconds -}}
{{- if not (and (lt $retry (float64 $times.renewDeadlineSeconds)) (le (add 3 $times.renewDeadlineSeconds) (int64 $times.leaseDurationSeconds))) -}}
{{- fail (printf "leaderElection: got retryPeriodSeconds %v, renewDeadlineSeconds %v, leaseDurationSeconds %v; expected 1.2 * retry < renew < lease - 2" $times.retryPeriodSeconds $times.renewDeadlineSeconds $times.leaseDurationSeconds) -}}
{{- end -}}
{{- end -}}

{{/* What is done to objects that have a namespace: the same rules in a ClusterRole or in Roles. */}}
{{- define "kimi-operator.namespacedRules" -}}
- apiGroups: [kimi-operator.io]
  resources: [kimideployments]
  verbs: [list, watch]
- apiGroups: [kimi-operator.io]
  resources: [kimideployments/status]
  verbs: [patch]
# Where OwnerReferencesPermissionEnforcement is on, blockOwnerDeletion of the children needs this.
- apiGroups: [kimi-operator.io]
  resources: [kimideployments/finalizers]
  verbs: [update]
- apiGroups: [apps]
  resources: [statefulsets, deployments]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [""]
  resources: [services, configmaps]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [""]
  resources: [pods]
  verbs: [list, watch, delete]
- apiGroups: [""]
  resources: [events]
  verbs: [list, create]
{{- end -}}
