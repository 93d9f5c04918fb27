{{/* Names, labels, images, secrets. */}}

{{- define "marl-ray.fullname" -}}
{{- $base := default .Chart.Name .Values.nameOverride -}}
{{- $name := contains $base .Release.Name | ternary .Release.Name (printf "%s-%s" .Release.Name $base) -}}
{{- default $name .Values.fullnameOverride | trunc 30 | trimSuffix "-" -}}
{{- end }}

{{/* (list $ NAME LONGEST KEY): the full name of a Ray object; KubeRay appends to it, so it must not be long. */}}
{{- define "marl-ray.objectname" -}}
{{- $root := index . 0 -}}
{{- $name := printf "%s-%s" (include "marl-ray.fullname" $root) (index . 1) -}}
{{- if gt (len $name) (int (index . 2)) }}{{ fail (printf "%s.%s: expected a name of at most %d characters with the release's, got %s" (index . 3) (index . 1) (int (index . 2)) $name) }}{{ end -}}
{{- $name -}}
{{- end }}

{{/*
(list $ COMPONENT): labels of all objects but Ray pods, which KubeRay's Services would select by app.kubernetes.io/name.
*/}}
{{- define "marl-ray.labels" -}}
helm.sh/chart: {{ printf "%s-%s" (index . 0).Chart.Name (index . 0).Chart.Version | replace "+" "_" }}
app.kubernetes.io/managed-by: {{ (index . 0).Release.Service }}
app.kubernetes.io/version: {{ (index . 0).Chart.AppVersion | quote }}
{{ include "marl-ray.selector" . }}
{{- end }}

{{/* (list $ COMPONENT): labels that never change, because the selectors of a StatefulSet cannot. */}}
{{- define "marl-ray.selector" -}}
app.kubernetes.io/name: {{ (index . 0).Chart.Name }}
app.kubernetes.io/instance: {{ (index . 0).Release.Name | quote }}
app.kubernetes.io/component: {{ index . 1 | quote }}
{{- end }}

{{- define "marl-ray.image" -}}
{{- with .Values.image -}}
{{- if .digest }}{{ .repository }}@{{ .digest }}{{ else }}{{ .repository }}:{{ default $.Chart.AppVersion .tag }}{{ end -}}
{{- end -}}
{{- end }}

{{- define "marl-ray.pullSecrets" -}}
{{- with .Values.image.pullSecrets -}}
imagePullSecrets:
{{- range . }}
  - name: {{ . | quote }}
{{- end }}
{{- end }}
{{- end }}

{{- define "marl-ray.serviceAccount" -}}
{{- default (include "marl-ray.fullname" .) .Values.serviceAccount.name -}}
{{- end }}

{{/* A mapping of cpu, memory, gpu: requests equal limits, so Kubernetes promises the memory to no other pod. */}}
{{- define "marl-ray.resources" -}}
{{- $quantities := dict "cpu" (toString .cpu) "memory" (toString .memory) -}}
{{- if .gpu }}{{ $_ := set $quantities (default "nvidia.com/gpu" .gpuResource) (toString .gpu) }}{{ end -}}
requests: {{ toJson $quantities }}
limits: {{ toJson $quantities }}
{{- end }}

{{- define "marl-ray.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{/* A mapping of runAsUser, runAsGroup, fsGroup. */}}
{{- define "marl-ray.podSecurity" -}}
runAsNonRoot: true
runAsUser: {{ .runAsUser }}
runAsGroup: {{ .runAsGroup }}
fsGroup: {{ .fsGroup }}
fsGroupChangePolicy: OnRootMismatch
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{/* (dict root name key): base64 of the value that a Secret has under a key; 32 random characters if it has none yet. */}}
{{- define "marl-ray.secretValue" -}}
{{- $data := (lookup "v1" "Secret" .root.Release.Namespace .name).data | default dict -}}
{{- get $data .key | default (randAlphaNum 32 | b64enc) -}}
{{- end }}

{{/* Lets generated Secrets and claims outlive the release: the data need their passwords. */}}
{{- define "marl-ray.keepAnnotation" -}}
helm.sh/resource-policy: keep
{{- end }}

{{/* (dict root name claim component modes): a claim, unless one that exists is named. */}}
{{- define "marl-ray.claim" -}}
{{- if not .claim.existing }}
apiVersion: v1
kind: PersistentVolumeClaim
metadata:
  name: {{ .name }}
  labels: {{- include "marl-ray.labels" (list .root .component) | nindent 4 }}
  annotations: {{- include "marl-ray.keepAnnotation" . | nindent 4 }}
spec:
  accessModes: {{ default (list "ReadWriteOnce") .modes | toJson }}
  {{- with .claim.storageClassName }}
  storageClassName: {{ . | quote }}
  {{- end }}
  resources:
    requests: {storage: {{ .claim.size | quote }}}
---
{{- end }}
{{- end }}

{{- define "marl-ray.databaseSecret" -}}
{{- default (printf "%s-database" (include "marl-ray.fullname" .)) .Values.postgresql.existingSecret -}}
{{- end }}

{{- define "marl-ray.mlflowDatabaseSecret" -}}
{{- default (printf "%s-mlflow-database" (include "marl-ray.fullname" .)) .Values.mlflow.existingDatabaseSecret -}}
{{- end }}

{{/* URI of the MLflow server that runs report to; empty if there is none. */}}
{{- define "marl-ray.trackingUri" -}}
{{- if .Values.mlflow.enabled }}http://{{ include "marl-ray.fullname" . }}-mlflow:5000{{ else }}{{ .Values.mlflow.externalUri }}{{ end -}}
{{- end }}

{{/* URI or path under which runs keep checkpoints and bundles; empty if the values name none. */}}
{{- define "marl-ray.storageUri" -}}
{{- if .Values.storage.uri }}{{ .Values.storage.uri }}{{ else if .Values.storage.claim.enabled }}{{ .Values.storage.claim.mountPath }}{{ end -}}
{{- end }}

{{- define "marl-ray.redisAddress" -}}
{{- if .Values.redis.enabled }}redis://{{ include "marl-ray.fullname" . }}-redis:6379{{ else }}{{ .Values.redis.externalAddress }}{{ end -}}
{{- end }}

{{- define "marl-ray.redisSecret" -}}
{{- if .Values.redis.existingSecret }}{{ .Values.redis.existingSecret }}{{ else if .Values.redis.enabled }}{{ include "marl-ray.fullname" . }}-redis{{ end -}}
{{- end }}

{{/* (list $ ROLE): the name of a priority class; empty if there is none. */}}
{{- define "marl-ray.priorityClass" -}}
{{- $root := index . 0 -}}
{{- if $root.Values.priorityClasses.create }}{{ include "marl-ray.fullname" $root }}-{{ $root.Release.Namespace }}-{{ index . 1 }}{{ else }}{{ get $root.Values.priorityClasses.names (index . 1) }}{{ end -}}
{{- end }}

{{/* Variables of libpq from a Secret with host, port, database, username, password. (list $ SECRET) */}}
{{- define "marl-ray.postgresEnv" -}}
{{- $secret := index . 1 -}}
- {name: PGSSLMODE, value: {{ (index . 0).Values.postgresql.sslMode }}}
{{- range $name, $key := dict "PGHOST" "host" "PGPORT" "port" "PGDATABASE" "database" "PGUSER" "username" "PGPASSWORD" "password" }}
- name: {{ $name }}
  valueFrom: {secretKeyRef: {name: {{ $secret | quote }}, key: {{ $key }}{{ if eq $name "PGPORT" }}, optional: true{{ end }}}}
{{- end }}
{{- end }}

{{- define "marl-ray.s3Env" -}}
{{- with .Values.s3 }}
{{- if .existingSecret }}
{{- range $key := list "AWS_ACCESS_KEY_ID" "AWS_SECRET_ACCESS_KEY" }}
- name: {{ $key }}
  valueFrom: {secretKeyRef: {name: {{ $.Values.s3.existingSecret | quote }}, key: {{ $key }}}}
{{- end }}
{{- end }}
{{- if .endpoint }}
- {name: AWS_ENDPOINT_URL, value: {{ .endpoint | quote }}}
- {name: MLFLOW_S3_ENDPOINT_URL, value: {{ .endpoint | quote }}}
{{- end }}
{{- if .region }}
- {name: AWS_REGION, value: {{ .region | quote }}}
- {name: AWS_DEFAULT_REGION, value: {{ .region | quote }}}
{{- end }}
{{- end }}
{{- end }}

{{/* (dict root name component key ingress service port): an Ingress; `key` is the value that errors name. */}}
{{- define "marl-ray.ingress" -}}
{{- if not (and .ingress.host .ingress.tlsSecret) }}{{ fail (printf "%s: expected host and tlsSecret, because keys and passwords travel in the requests" .key) }}{{ end -}}
apiVersion: networking.k8s.io/v1
kind: Ingress
metadata:
  name: {{ .name }}
  labels: {{- include "marl-ray.labels" (list .root .component) | nindent 4 }}
  {{- with .ingress.annotations }}
  annotations: {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  {{- with .ingress.className }}
  ingressClassName: {{ . | quote }}
  {{- end }}
  tls:
    - hosts: [{{ .ingress.host | quote }}]
      secretName: {{ .ingress.tlsSecret | quote }}
  rules:
    - host: {{ .ingress.host | quote }}
      http:
        paths:
          - path: /
            pathType: Prefix
            backend:
              service:
                name: {{ .service }}
                port: {number: {{ .port }}}
{{- end }}
