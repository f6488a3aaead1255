{{/* The name of all objects. */}}
{{- define "kvgate.fullname" -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 53 | trimSuffix "-" -}}
{{- else if contains $name .Release.Name -}}
{{- .Release.Name | trunc 53 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 53 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "kvgate.selectorLabels" -}}
app.kubernetes.io/name: kvgate
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "kvgate.labels" -}}
{{ include "kvgate.selectorLabels" . }}
app.kubernetes.io/version: {{ default .Chart.AppVersion .Values.image.tag | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end -}}

{{- define "kvgate.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "kvgate.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- required "serviceAccount.name: name an existing service account, or set serviceAccount.create" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{/* What the values say of the configuration, and what is the chart's. */}}
{{- define "kvgate.config" -}}
{{- $config := deepCopy .Values.config -}}
{{- $_ := set $config "listen" ":8080" -}}
{{- $_ := set $config "admin" (merge (dict "listen" ":9090") (default dict $config.admin)) -}}
{{- if .Values.tls.secretName -}}
{{- $_ := set $config "tls" (dict "cert_file" "/etc/kvgate/tls/tls.crt" "key_file" "/etc/kvgate/tls/tls.key") -}}
{{- end -}}
{{- toYaml $config -}}
{{- end -}}

{{/* What a reload cannot change: all but what kvgate config default does not mark so. */}}
{{- define "kvgate.restartConfig" -}}
{{- $config := include "kvgate.config" . | fromYaml -}}
{{- if eq .Values.rollOnChange "restart" -}}
{{- $config = omit $config "retry" "health" "scrape" "state" "names" "auth" "quotas" "usage" "pools" -}}
{{- end -}}
{{- toJson $config -}}
{{- end -}}

{{/* The namespaces in which pods are discovered, as a JSON list; empty if none are. */}}
{{- define "kvgate.namespaces" -}}
{{- $all := list -}}
{{- range .Values.config.pools -}}
{{- with .discovery.kubernetes -}}
{{- if not .kubeconfig -}}
{{- $all = concat $all (default (list $.Release.Namespace) .namespaces) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $all | uniq | sortAlpha | toJson -}}
{{- end -}}

{{/* Whole seconds of a duration such as 1m30s, rounded up. */}}
{{- define "kvgate.seconds" -}}
{{- $zero := toDate "2006-01-02" "2000-01-01" -}}
{{- sub (mustDateModify . $zero | mustDateModify "999ms" | unixEpoch) ($zero | unixEpoch) -}}
{{- end -}}
