{{- /* An image in the registry, by its digest where that is known. */ -}}
{{- define "glm5.image" -}}
{{- $name := .name -}}
{{- if .values.registry -}}{{- $name = printf "%s/%s" (regexReplaceAll "/+$" .values.registry "") .name -}}{{- end -}}
{{- if .digest -}}{{- printf "%s@%s" $name .digest -}}{{- else -}}{{- printf "%s:%s" $name .tag -}}{{- end -}}
{{- end -}}

{{- /* Limits equal requests, so that the pod is not the first evicted. */ -}}
{{- define "glm5.resources" -}}
{{- $cpu := .values.cpu | default (mul 8 .dies | toString) -}}
{{- $memory := .values.memory | default (printf "%dGi" (mul 48 .dies)) -}}
{{- $needs := dict .values.npu (toString .dies) "cpu" $cpu "memory" $memory -}}
{{- dict "limits" $needs "requests" $needs | toJson -}}
{{- end -}}
