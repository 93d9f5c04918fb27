{{/* The specification of a RayJob: (dict root key name fullname job keepRecordSeconds), where `job` has all keys of jobDefaults. */}}
{{- define "marl-ray.rayJob" -}}
{{- $job := .job -}}
{{- $root := .root -}}
{{- $autoscaling := mergeOverwrite (deepCopy $root.Values.ray.autoscaling) ($job.autoscaling | default dict) -}}
{{- $storage := include "marl-ray.storageUri" $root -}}
{{- if ne 1 (len (compact (list $job.entrypoint $job.configFile (empty $job.config | ternary "" "config")))) }}{{ fail (printf "%s: expected one of config, configFile and entrypoint" .key) }}{{ end -}}
{{- if and (not $storage) (not $job.entrypoint) }}{{ fail (printf "storage: expected uri or claim.enabled, because a retry of %s is a new cluster that continues from there" .key) }}{{ end -}}
{{- if and $job.onCluster (not $root.Values.cluster.enabled) }}{{ fail (printf "%s.onCluster: expected cluster.enabled beside it" .key) }}{{ end -}}
{{- if and $job.onCluster $job.config }}{{ fail (printf "%s.config: expected configFile or entrypoint with onCluster, or `marl-ray submit`: the cluster was there before the config" .key) }}{{ end -}}
entrypoint: {{ include "marl-ray.entrypoint" . | quote }}
submissionMode: K8sJobMode
{{- if $job.onCluster }}
clusterSelector:
  ray.io/cluster: {{ include "marl-ray.fullname" $root | quote }}
{{- else }}
backoffLimit: {{ $job.backoffLimit }}
{{- end }}
activeDeadlineSeconds: {{ $job.activeDeadlineSeconds }}
preRunningDeadlineSeconds: {{ $job.preRunningDeadlineSeconds }}
{{- if $job.onCluster }}
{{- else if and (not .keepRecordSeconds) (or $root.Values.kueue.queue $job.suspend) }}
# KubeRay lets a job that may be suspended, as Kueue does until there is room, end its cluster only in this way.
{{- if $job.suspend }}
suspend: true
{{- end }}
shutdownAfterJobFinishes: true
ttlSecondsAfterFinished: {{ $job.keepSucceededSeconds }}
{{- else }}
deletionStrategy:
  deletionRules:
    - {policy: DeleteCluster, condition: {jobStatus: SUCCEEDED, ttlSeconds: {{ $job.keepSucceededSeconds }}}}
    # `Failed` stands for every failure, also for a deadline. Workers hold the machines that cost, the head has the logs.
    {{- if not $autoscaling.enabled }}
    - {policy: DeleteWorkers, condition: {jobDeploymentStatus: Failed, ttlSeconds: 0}}
    {{- end }}
    - {policy: DeleteCluster, condition: {jobDeploymentStatus: Failed, ttlSeconds: {{ $job.keepFailedSeconds }}}}
    {{- with .keepRecordSeconds }}
    # A cron job makes RayJobs without end, and nothing else takes them away.
    - {policy: DeleteSelf, condition: {jobStatus: SUCCEEDED, ttlSeconds: {{ . }}}}
    - {policy: DeleteSelf, condition: {jobDeploymentStatus: Failed, ttlSeconds: {{ . }}}}
    {{- end }}
{{- end }}
submitterConfig:
  backoffLimit: 2
submitterPodTemplate:
  metadata:
    labels: {{- include "marl-ray.rayLabels" . | nindent 6 }}
      marl-ray/role: submitter
  spec:
    restartPolicy: Never
    automountServiceAccountToken: false
{{- with include "marl-ray.pullSecrets" $root }}{{ . | trim | nindent 4 }}{{ end }}
    securityContext: {{- include "marl-ray.podSecurity" (dict "runAsUser" 1000 "runAsGroup" 1000 "fsGroup" 1000) | nindent 6 }}
    containers:
      - name: ray-job-submitter   # without a command: KubeRay gives it
        image: {{ include "marl-ray.image" $root }}
        imagePullPolicy: {{ $root.Values.image.pullPolicy }}
        securityContext: {{- include "marl-ray.containerSecurity" . | nindent 10 }}
        resources: {{- include "marl-ray.resources" (dict "cpu" "500m" "memory" "512Mi") | nindent 10 }}
        env:
          - {name: HOME, value: /tmp}
        volumeMounts:
          - {name: tmp, mountPath: /tmp}
    volumes:
      - name: tmp
        emptyDir: {sizeLimit: 1Gi}
{{- if not $job.onCluster }}
rayClusterSpec:
  {{- $mounts := "" }}
  {{- $volumes := "" }}
  {{- if $job.config }}
  {{- $mounts = "- {name: config, mountPath: /etc/marl-ray, readOnly: true}" }}
  {{- $volumes = printf "- name: config\n  configMap: {name: %s-config}" .fullname }}
  {{- end }}
  {{- include "marl-ray.rayCluster" (dict "root" $root "name" .name "kind" "job" "spec" $job "groups" $root.Values.groups "mounts" $mounts "volumes" $volumes) | nindent 2 }}
{{- end }}
{{- end }}

{{/*
The command line that runs on the head: the command, its config, and the storage of its results. KubeRay's submitter hands
it to a shell first, in which the submission's id is the RayJob's name and five letters. So a run of a cron job is named
after its RayJob: each time has another name, and a retry has the same one, so that it continues.
*/}}
{{- define "marl-ray.entrypoint" -}}
{{- $job := .job -}}
{{- if $job.entrypoint -}}
{{ $job.entrypoint }}
{{- else -}}
{{- $words := list "marl-ray" $job.command (default "/etc/marl-ray/config.yaml" $job.configFile) -}}
{{- $quoted := list -}}
{{- range append (concat $words $job.overrides) (printf "storage=%s" (include "marl-ray.storageUri" .root)) -}}
{{- $quoted = append $quoted (regexMatch "^[A-Za-z0-9_./:=@%+,-]+$" . | ternary . (replace "'" "'\\''" . | squote)) -}}
{{- end -}}
{{- if .keepRecordSeconds }}{{ $quoted = append $quoted "name=${RAY_JOB_SUBMISSION_ID%-*}" }}{{ end -}}
{{ join " " $quoted }}
{{- end -}}
{{- end }}

{{/* (dict root name fullname job immutable): the config that the command reads, as a ConfigMap. */}}
{{- define "marl-ray.jobConfig" -}}
{{- if .job.config }}
---
apiVersion: v1
kind: ConfigMap
metadata:
  name: {{ .fullname }}-config
  labels: {{- include "marl-ray.labels" (list .root .name) | nindent 4 }}
{{- if .immutable }}
# A retry must find what the first attempt found: another config is another job.
immutable: true
{{- end }}
data:
  config.yaml: |
    {{- toYaml .job.config | nindent 4 }}
{{- end }}
{{- end }}
