{{/* Egress rules of the NetworkPolicies. */}}

{{- define "marl-ray.dnsEgress" -}}
# DNS. The rule names the port alone, because clusters run their DNS in different places, some on the node.
- ports:
    - {port: 53, protocol: UDP}
    - {port: 53, protocol: TCP}
{{- end }}

{{/*
(list $ COMPONENTS): to those of mlflow, postgresql and redis that the pods need, inside or outside of the release; to
storage; and the rules of networkPolicy.extraEgress.
*/}}
{{- define "marl-ray.serviceEgress" -}}
{{- $root := index . 0 -}}
{{- $values := $root.Values -}}
{{- $ports := list }}
{{- if $values.networkPolicy.egressToInternet }}{{ $ports = list 443 6443 }}{{ end }}
{{- $externalAddresses := dict "mlflow" $values.mlflow.externalUri "redis" $values.redis.externalAddress "postgresql" "postgresql://any:5432" }}
{{- $addresses := list $values.s3.endpoint }}
{{- range $component := index . 1 }}
{{- if not (index $values $component).enabled }}{{ $addresses = append $addresses (get $externalAddresses $component) }}{{ end }}
{{- end }}
{{- range compact $addresses }}
{{- $port := regexFind ":[0-9]+$" (urlParse .).host | trimPrefix ":" }}
{{- if and $port (not (has (int $port) $ports)) }}{{ $ports = append $ports (int $port) }}{{ end }}
{{- end }}
{{- range $component := index . 1 }}
{{- if (index $values $component).enabled }}
- to:
    - podSelector:
        matchLabels: {{- include "marl-ray.selector" (list $root $component) | nindent 10 }}
  ports:
    - {port: {{ get (dict "mlflow" 5000 "postgresql" 5432 "redis" 6379) $component }}, protocol: TCP}
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
