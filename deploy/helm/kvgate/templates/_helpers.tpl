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

{{/* What a reload cannot change, by key. */}}
{{- define "kvgate.restartConfig" -}}
{{- $config := include "kvgate.config" . | fromYaml -}}
{{- if eq .Values.rollOnChange "restart" -}}
{{- $all := $config -}}
{{- $config = dict -}}
{{- range $key := include "kvgate.restartKeys" . | fromJsonArray -}}
{{- $at := $all -}}
{{- range splitList "." $key -}}
{{- if kindIs "map" $at -}}{{- $at = get $at . -}}{{- end -}}
{{- end -}}
{{- if ne (toString $at) "" -}}{{- $_ := set $config $key $at -}}{{- end -}}
{{- end -}}
{{- end -}}
{{- toJson $config -}}
{{- end -}}

{{/* The directories that the configuration has files written into, as a JSON list, but for those with a volume of their own. */}}
{{- define "kvgate.directories" -}}
{{- $config := .Values.config -}}
{{- $usage := default dict $config.usage -}}
{{- $all := list -}}
{{- range list (default dict $config.state).file $usage.file (default dict $usage.webhook).spool (default dict $config.record).file -}}
{{- if . -}}
{{- $dir := dir . -}}
{{- $mounted := false -}}
{{- range $.Values.volumeMounts -}}
{{- if hasPrefix (printf "%s/" (trimSuffix "/" .mountPath)) (printf "%s/" $dir) -}}{{- $mounted = true -}}{{- end -}}
{{- end -}}
{{- if not $mounted -}}{{- $all = append $all $dir -}}{{- end -}}
{{- end -}}
{{- end -}}
{{- $all | uniq | toJson -}}
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
