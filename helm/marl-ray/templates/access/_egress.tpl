{{/* Where pods may call out to: rules of NetworkPolicies. */}}

{{- define "marl-ray.dnsEgress" -}}
# Without names nothing else works. The port alone: clusters run their DNS in different places, some on the node.
- ports:
    - {port: 53, protocol: UDP}
    - {port: 53, protocol: TCP}
{{- end }}

{{/* (list $ COMPONENTS): those of mlflow, postgresql and redis that pods need, here or elsewhere; storage; what is added. */}}
{{- define "marl-ray.serviceEgress" -}}
{{- $root := index . 0 -}}
{{- $values := $root.Values -}}
{{- $ports := list }}
{{- if $values.networkPolicy.egressToInternet }}{{ $ports = list 443 6443 }}{{ end }}
{{- $elsewhere := dict "mlflow" $values.mlflow.externalUri "redis" $values.redis.externalAddress "postgresql" "postgresql://any:5432" }}
{{- $addresses := list $values.s3.endpoint }}
{{- range $component := index . 1 }}
{{- if not (index $values $component).enabled }}{{ $addresses = append $addresses (get $elsewhere $component) }}{{ end }}
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
