{{/* Where pods may call out to: rules of NetworkPolicies. */}}

{{- define "marl-ray.dnsEgress" -}}
# Without names nothing else works. The port alone: clusters run their DNS in different places, some on the node.
- ports:
    - {port: 53, protocol: UDP}
    - {port: 53, protocol: TCP}
{{- end }}

{{/* (list $ DATABASE): the chart's services or the external ones, storage, and what the values add. */}}
{{- define "marl-ray.serviceEgress" -}}
{{- $root := index . 0 -}}
{{- $values := $root.Values -}}
{{- $ports := list }}
{{- if $values.networkPolicy.egressToInternet }}{{ $ports = list 443 6443 }}{{ end }}
{{- $addresses := list $values.s3.endpoint $values.mlflow.externalUri (include "marl-ray.redisAddress" $root) }}
{{- range compact $addresses }}
{{- $port := regexFind ":[0-9]+$" (urlParse .).host | trimPrefix ":" }}
{{- if and $port (not (has (int $port) $ports)) }}{{ $ports = append $ports (int $port) }}{{ end }}
{{- end }}
{{- if and (index . 1) (not $values.postgresql.enabled) }}{{ $ports = append $ports 5432 }}{{ end }}
{{- $inside := dict "mlflow" 5000 "redis" 6379 }}
{{- if index . 1 }}{{ $_ := set $inside "postgresql" 5432 }}{{ end }}
{{- range $component, $port := $inside }}
{{- if (index $values $component).enabled }}
- to:
    - podSelector:
        matchLabels: {{- include "marl-ray.selector" (list $root $component) | nindent 10 }}
  ports:
    - {port: {{ $port }}, protocol: TCP}
{{- end }}
{{- end }}
{{- with $ports }}
- ports:
  {{- range . }}
    - {port: {{ . }}, protocol: TCP}
  {{- end }}
{{- end }}
{{- with $values.networkPolicy.extraEgress }}{{ toYaml . | nindent 0 }}{{ end }}
{{- end }}
