{{/* The specification of a Ray cluster, the same for RayCluster, RayJob, RayCronJob and RayService. */}}

{{/*
(dict root name kind spec groups): `name` is the part of the release that the cluster belongs to, `kind` what it is for
(cluster, job, service), `spec` has head, groups, autoscaling, faultTolerance; `groups` are those that it starts from.
*/}}
{{- define "marl-ray.rayCluster" -}}
{{- $ray := .root.Values.ray -}}
{{- $autoscaling := mergeOverwrite (deepCopy $ray.autoscaling) (.spec.autoscaling | default dict) -}}
{{- $head := mergeOverwrite (deepCopy $ray.head) (.spec.head | default dict) (dict "role" "head" "spot" "never") -}}
{{- $groups := mergeOverwrite (deepCopy .groups) (.spec.groups | default dict) -}}
{{- $redis := include "marl-ray.redisAddress" .root -}}
rayVersion: {{ $ray.version | quote }}
authOptions:
  mode: {{ $ray.auth.mode }}
  {{- if and $ray.auth.existingSecret (eq $ray.auth.mode "token") }}
  secretName: {{ $ray.auth.existingSecret | quote }}
  {{- end }}
{{- if and .spec.faultTolerance $redis }}
# Without it a head that is replaced takes all workers with it; with it they continue while it comes back.
gcsFaultToleranceOptions:
  redisAddress: {{ $redis | quote }}
  {{- with include "marl-ray.redisSecret" .root }}
  redisPassword:
    valueFrom:
      secretKeyRef: {name: {{ . | quote }}, key: password}
  {{- end }}
{{- end }}
{{- if $autoscaling.enabled }}
enableInTreeAutoscaling: true
autoscalerOptions:
  version: v2
  idleTimeoutSeconds: {{ $autoscaling.idleTimeoutSeconds }}
  resources: {{- include "marl-ray.resources" $autoscaling.resources | nindent 4 }}
  securityContext: {{- include "marl-ray.containerSecurity" . | nindent 4 }}
  env:
    - {name: HOME, value: /tmp}
  volumeMounts:
    - {name: tmp, mountPath: /tmp}
{{- end }}
headGroupSpec:
  rayStartParams:
    num-cpus: "0"   # no tasks on the head, where they could starve Ray's control plane
  template: {{- include "marl-ray.rayPod" (dict "root" .root "name" .name "kind" .kind "group" $head "autoscaling" $autoscaling.enabled "mounts" .mounts "volumes" .volumes) | nindent 4 }}
workerGroupSpecs:
{{- $cluster := . }}
{{- range $name, $group := $groups }}
{{- if and (dig "enabled" true $group) (or $autoscaling.enabled (ne $group.role "rollout") (gt (int $group.replicas) 0)) }}
{{- $minReplicas := dig "minReplicas" $group.replicas $group }}
{{- $maxReplicas := dig "maxReplicas" $group.replicas $group }}
  - groupName: {{ kebabcase $name | quote }}
    {{- if eq (int $minReplicas) (int $maxReplicas) }}
    replicas: {{ $group.replicas }}
    {{- end }}
    minReplicas: {{ $minReplicas }}
    maxReplicas: {{ $maxReplicas }}
    {{- if and $autoscaling.enabled $group.priority }}
    priority: {{ $group.priority }}
    {{- end }}
    {{- with $group.numOfHosts }}
    numOfHosts: {{ . }}
    {{- end }}
    rayStartParams: {}
    labels:
      marl-ray/role: {{ $group.role }}
      {{- if ne $group.spot "any" }}
      ray.io/market-type: {{ eq $group.spot "only" | ternary "spot" "on-demand" }}
      {{- end }}
      {{- with $group.labels }}{{ toYaml . | nindent 6 }}{{ end }}
    template: {{- include "marl-ray.rayPod" (dict "root" $cluster.root "name" $cluster.name "kind" $cluster.kind "group" $group "autoscaling" $autoscaling.enabled "mounts" $cluster.mounts "volumes" $cluster.volumes) | nindent 6 }}
{{- end }}
{{- end }}
{{- end }}

{{/* (dict root name kind group autoscaling): a pod of the head (role head) or of a worker group. */}}
{{- define "marl-ray.rayPod" -}}
{{- $values := .root.Values -}}
{{- $ray := $values.ray -}}
{{- $group := .group -}}
{{- $isHead := eq $group.role "head" -}}
metadata:
  labels: {{- include "marl-ray.rayLabels" . | nindent 4 }}
    marl-ray/role: {{ $group.role }}
  {{- with include "marl-ray.rayAnnotations" . | trim }}
  annotations: {{- . | nindent 4 }}
  {{- end }}
spec:
  serviceAccountName: {{ include "marl-ray.serviceAccount" .root | quote }}
  # The autoscaler, in the head pod, asks the API server for workers; nothing else needs it.
  automountServiceAccountToken: {{ and $isHead .autoscaling }}
{{- with include "marl-ray.pullSecrets" .root }}{{ . | trim | nindent 2 }}{{ end }}
  {{- if .autoscaling }}
  restartPolicy: Never   # version 2 of the autoscaler replaces pods instead of restarting them
  {{- end }}
  terminationGracePeriodSeconds: {{ add $ray.preStopSeconds $ray.drainSeconds $ray.marginSeconds }}
  {{- $class := $isHead | ternary (eq .kind "service" | ternary "serving" "head") $group.role }}
  {{- with default (has $class (list "serving" "head" "learner" "rollout") | ternary (include "marl-ray.priorityClass" (list .root $class)) "") $group.priorityClassName }}
  priorityClassName: {{ . | quote }}
  {{- end }}
  {{- with $group.nodeSelector }}
  nodeSelector: {{- toYaml . | nindent 4 }}
  {{- end }}
{{- with include "marl-ray.placement" . }}{{ . | trim | nindent 2 }}{{ end }}
  securityContext: {{- include "marl-ray.podSecurity" (dict "runAsUser" 1000 "runAsGroup" 1000 "fsGroup" 1000) | nindent 4 }}
  containers:
    # No probes: KubeRay adds some, which for serving workers ask Serve's proxy too, and the chart's would replace them.
    - name: {{ $isHead | ternary "ray-head" "ray-worker" }}
      image: {{ include "marl-ray.image" .root }}
      imagePullPolicy: {{ $values.image.pullPolicy }}
      securityContext: {{- include "marl-ray.containerSecurity" . | nindent 8 }}
      resources: {{- include "marl-ray.resources" $group.resources | nindent 8 }}
      ports:
        {{- if $isHead }}
        - {containerPort: 6379, name: gcs-server}
        - {containerPort: 8265, name: dashboard}
        - {containerPort: 44217, name: as-metrics}     # the autoscaler's
        - {containerPort: 44227, name: dash-metrics}   # the dashboard's
        {{- end }}
        {{- if eq .kind "service" }}
        - {containerPort: 8000, name: serve}
        {{- end }}
        - {containerPort: 8080, name: metrics}
      lifecycle:
        preStop:
          # Services forget the pod meanwhile; it still answers. Then SIGTERM makes `ray start --block` drain.
          exec: {command: [sleep, {{ $ray.preStopSeconds | quote }}]}
      env: {{- include "marl-ray.rayEnv" . | nindent 8 }}
      {{- if or $ray.envFromSecrets (and (not $values.mlflow.enabled) $values.mlflow.existingSecret) }}
      envFrom:
        {{- range $ray.envFromSecrets }}
        - secretRef: {name: {{ . | quote }}}
        {{- end }}
        {{- if and (not $values.mlflow.enabled) $values.mlflow.existingSecret }}
        - secretRef: {name: {{ $values.mlflow.existingSecret | quote }}}
        {{- end }}
      {{- end }}
      volumeMounts:
        - {name: shared-memory, mountPath: /dev/shm}
        {{- if $values.storage.claim.enabled }}
        - {name: storage, mountPath: {{ $values.storage.claim.mountPath }}}
        {{- end }}
        {{- with .mounts }}{{ . | nindent 8 }}{{ end }}
        - {name: tmp, mountPath: /tmp}   # Ray's folder /tmp/ray, and caches of libraries
  volumes:
    # In memory, so it counts as the container's, whose limit bounds it: Ray's object store would otherwise spill to disk.
    - name: shared-memory
      emptyDir: {medium: Memory{{ with $group.sharedMemory }}, sizeLimit: {{ . | quote }}{{ end }}}
    {{- if $values.storage.claim.enabled }}
    - name: storage
      persistentVolumeClaim: {claimName: {{ default (printf "%s-storage" (include "marl-ray.fullname" .root)) $values.storage.claim.existing | quote }}}
    {{- end }}
    {{- with .volumes }}{{ . | nindent 4 }}{{ end }}
    - name: tmp
      emptyDir: {sizeLimit: {{ default "50Gi" $group.tmpSize | quote }}}
{{- end }}

{{- define "marl-ray.rayAnnotations" -}}
{{- $monitoring := .root.Values.monitoring -}}
{{- if and $monitoring.annotations (not $monitoring.podMonitor) }}
prometheus.io/scrape: "true"
prometheus.io/port: "8080"
{{- end }}
{{- if and (ne .kind "service") (has .group.role (list "head" "learner")) }}
# A pod that is moved to save a machine costs the run a restart.
cluster-autoscaler.kubernetes.io/safe-to-evict: "false"
karpenter.sh/do-not-disrupt: "true"
{{- end }}
{{- with .group.annotations }}{{ toYaml . | nindent 0 }}{{ end }}
{{- end }}

{{/* (dict root name): labels of our own, which a PodDisruptionBudget and a NetworkPolicy select by. */}}
{{- define "marl-ray.rayLabels" -}}
marl-ray/release: {{ .root.Release.Name | quote }}
marl-ray/name: {{ .name | quote }}
{{- end }}

{{/*
The market of machines, in the words of several clouds, and the spread over machines and zones, so that the loss of one
takes one pod.
*/}}
{{- define "marl-ray.placement" -}}
{{- $group := .group -}}
{{- $markets := list (list "karpenter.sh/capacity-type" "spot") (list "eks.amazonaws.com/capacityType" "SPOT") (list "cloud.google.com/gke-spot" "true") (list "kubernetes.azure.com/scalesetpriority" "spot") -}}
{{- if ne $group.spot "any" }}
affinity:
  nodeAffinity:
    requiredDuringSchedulingIgnoredDuringExecution:
      nodeSelectorTerms:
        {{- if eq $group.spot "never" }}
        - matchExpressions:
          {{- range $markets }}
            - {key: {{ index . 0 }}, operator: NotIn, values: [{{ index . 1 | quote }}]}
          {{- end }}
        {{- else }}
        {{- range $markets }}
        - matchExpressions:
            - {key: {{ index . 0 }}, operator: In, values: [{{ index . 1 | quote }}]}
        {{- end }}
        {{- end }}
{{- end }}
{{- if or (ne $group.spot "never") $group.resources.gpu $group.tolerations }}
tolerations:
  {{- if ne $group.spot "never" }}
  - {key: cloud.google.com/gke-spot, operator: Equal, value: "true", effect: NoSchedule}
  - {key: kubernetes.azure.com/scalesetpriority, operator: Equal, value: spot, effect: NoSchedule}
  {{- end }}
  {{- if $group.resources.gpu }}
  - {key: {{ default "nvidia.com/gpu" $group.resources.gpuResource }}, operator: Exists, effect: NoSchedule}
  {{- end }}
  {{- with $group.tolerations }}{{ toYaml . | nindent 2 }}{{ end }}
{{- end }}
{{- if ne $group.role "head" }}
topologySpreadConstraints:
  {{- range $key := eq $group.role "serving" | ternary (list "kubernetes.io/hostname" "topology.kubernetes.io/zone") (list "kubernetes.io/hostname") }}
  - maxSkew: 1
    topologyKey: {{ $key }}
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels: {{- include "marl-ray.rayLabels" $ | nindent 8 }}
        marl-ray/role: {{ $group.role }}
  {{- end }}
{{- end }}
{{- end }}

{{/* Variables of all Ray pods. The head has them too: drivers run there, and Serve builds applications there. */}}
{{- define "marl-ray.rayEnv" -}}
{{- $ray := .root.Values.ray -}}
- {name: HOME, value: /tmp}
# Seconds that Ray drains on SIGTERM; the grace period is longer, or requests and checkpoints would be cut off.
- {name: RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S, value: {{ $ray.drainSeconds | quote }}}
- {name: RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S, value: {{ $ray.preemptionPollSeconds | quote }}}
{{- with include "marl-ray.trackingUri" .root }}
- {name: MLFLOW_TRACKING_URI, value: {{ . | quote }}}
{{- end }}
{{- with include "marl-ray.s3Env" .root }}{{ . | trim | nindent 0 }}{{ end }}
{{- if eq .kind "service" }}
{{- include "marl-ray.postgresEnv" (list .root (include "marl-ray.databaseSecret" .root)) | nindent 0 }}
{{- end }}
{{- range $name, $value := mergeOverwrite (deepCopy $ray.env) (.group.env | default dict) }}
- {name: {{ $name | quote }}, value: {{ $value | quote }}}
{{- end }}
{{- end }}

{{/* Labels by which Kueue admits a Ray object as a whole. */}}
{{- define "marl-ray.kueue" -}}
{{- with .Values.kueue.queue }}
kueue.x-k8s.io/queue-name: {{ . | quote }}
{{- end }}
{{- with .Values.kueue.priorityClass }}
kueue.x-k8s.io/priority-class: {{ . | quote }}
{{- end }}
{{- end }}

{{/* (list $ SPEC): Kueue refuses a job or a cluster that scales unless it is marked so. A marked service could not be upgraded. */}}
{{- define "marl-ray.elastic" -}}
{{- $root := index . 0 -}}
{{- $autoscaling := mergeOverwrite (deepCopy $root.Values.ray.autoscaling) ((index . 1).autoscaling | default dict) -}}
{{- if and $root.Values.kueue.queue $autoscaling.enabled }}
annotations:
  kueue.x-k8s.io/elastic-job: "true"
{{- end }}
{{- end }}
